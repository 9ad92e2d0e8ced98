# syntax=docker/dockerfile:1
# The daemon on a small image: kvd, kvd-client and what they need, no compiler, not root. The stage
# that builds has zig's, for the small library that copies (kvd/native).
# For a build that is the same for ever, give the image by digest:
#   docker build --build-arg PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:... .
# For engines whose KV lies on GPUs, by the CUDA version of the nodes' driver (docs/gpu.md):
#   docker build --build-arg GPU=cuda12 .
# That adds CuPy, which carries the CUDA runtime; the driver's libraries are put into the container
# by NVIDIA's container toolkit. No CUDA base image is needed.
# For tiers of the kinds s3 and mooncake, which need more beside kvd (docs/tiers.md):
#   docker build --build-arg EXTRAS=s3,mooncake .
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG GPU=
ARG EXTRAS=
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY requirements/constraints.txt requirements/constraints.txt
RUN python3 -m venv /build/tools \
 && /build/tools/bin/pip install --no-cache-dir --disable-pip-version-check \
      -c requirements/constraints.txt hatchling==1.33.0 \
 && { command -v cc >/dev/null \
   || /build/tools/bin/pip install --no-cache-dir --disable-pip-version-check \
        -c requirements/constraints.txt ziglang; }
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY docs docs
COPY deploy deploy
COPY kvd kvd
RUN /build/tools/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps \
      --no-build-isolation --wheel-dir /build/wheels ./client .
RUN extras="${GPU}${GPU:+${EXTRAS:+,}}${EXTRAS}" \
 && python3 -m venv /opt/kvd \
 && /opt/kvd/bin/pip install --no-cache-dir --disable-pip-version-check \
      -c requirements/constraints.txt /build/wheels/kvd_client-*.whl \
      "$(echo /build/wheels/kvd-*.whl)${extras:+[${extras}]}" \
 && /opt/kvd/bin/kvd version \
 && /opt/kvd/bin/python -m pip uninstall --yes --quiet pip setuptools

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="kvd" \
      org.opencontainers.image.description="KV cache of LLM engines, in host memory" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG EXTRAS=
# What Mooncake's client is linked with.
# hadolint ignore=DL3008
RUN case ",${EXTRAS}," in *,mooncake,*) \
      apt-get update \
      && apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4 \
      && rm -rf /var/lib/apt/lists/* ;; \
    esac
# Fixed numbers, so that files on a pool that outlives the container keep their owner.
RUN groupadd --system --gid 10001 kvd \
 && useradd --system --uid 10001 --gid 10001 --home-dir /nonexistent --shell /usr/sbin/nologin kvd \
 && install -d -o kvd -g kvd -m 0750 /run/kvd \
 && install -d -o kvd -g kvd -m 0700 /var/lib/kvd /var/lib/kvd/pool
COPY --from=build /opt/kvd /opt/kvd
ENV PATH=/opt/kvd/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 9470
STOPSIGNAL SIGTERM
# Whether the daemon answers at its socket: KVD_SOCKET, else that of /etc/kvd/kvd.toml, else the default.
# Touching a large pool takes its time at the first start.
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m --retries=3 \
  CMD ["kvd", "status", "--timeout", "5"]
# No init is needed: what kvd starts are its children, which it reaps. Orphans of an exec into the
# container stay zombies until it ends: run it with --init where shells are left behind there. In
# Kubernetes the pod's first process reaps them.
ENTRYPOINT ["kvd"]
CMD ["serve"]
