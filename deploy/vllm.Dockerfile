# vLLM's image with kvd's connector in it. From the root of this repository:
#   docker build -f deploy/vllm.Dockerfile -t vllm-kvd:0.33.0 .
# Another release of vLLM, or an image of your own: --build-arg VLLM_IMAGE=...
ARG VLLM_IMAGE=vllm/vllm-openai:v0.33.0
FROM ${VLLM_IMAGE}
COPY client /tmp/kvd-client
# What it needs (numpy, grpcio, protobuf) is in the image already. --no-deps, so that none of it changes;
# the second line fails the build where something is missing.
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/kvd-client \
 && python3 -c "import kvd_client, kvd_proto.v1.worker_pb2_grpc, kvd_client.integrations.vllm.options" \
 && rm -rf /tmp/kvd-client
