{{- /* What both modes have in common: the daemon's containers and their volumes. */ -}}
{{- define "kvd.containerSecurityContext" -}}
{{- $ours := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- if eq .Values.mode "sidecar" -}}
{{- /* The pod is the engine's, and so are its own user and group. */ -}}
{{- $ours = merge (dict "runAsNonRoot" true "runAsUser" .Values.user "runAsGroup" .Values.group) $ours -}}
{{- end -}}
{{- toYaml (mergeOverwrite $ours (deepCopy .Values.containerSecurityContext)) -}}
{{- end -}}

{{- define "kvd.initContainer" -}}
# The node makes the directories as root's; the daemon is not root.
- name: own-directories
  image: {{ include "kvd.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - /bin/sh
    - -euc
    - |
      {{- if and .Values.pool.mount (eq .Values.mode "daemonset") }}
      pool=/var/lib/kvd/pool
      if [ "$(stat -f -c %T $pool)" != tmpfs ]; then
        mount -t tmpfs -o size={{ include "kvd.tmpfsMiB" . }}m,mode=0700,nosuid,nodev,noexec kvd $pool
      elif [ "$(df -m --output=size $pool | tail -n 1)" -lt {{ include "kvd.tmpfsMiB" . }} ]; then
        mount -o remount,size={{ include "kvd.tmpfsMiB" . }}m $pool
      fi
      {{- end }}
      install -d -o {{ int64 .Values.user }} -g {{ int64 .Values.group }} -m 0700 /var/lib/kvd/pool
      install -d -o {{ int64 .Values.user }} -g {{ int64 .Values.group }} -m 0750 /run/kvd
      {{- if .Values.pool.hugePages.size }}
      install -d -o {{ int64 .Values.user }} -g {{ int64 .Values.group }} -m 0700 /var/lib/kvd/extents
      {{- end }}
      {{- range $tier := .Values.tiers }}
      {{- range $place, $source := $tier.volumes }}
      install -d -o {{ int64 $.Values.user }} -g {{ int64 $.Values.group }} -m 0700 /var/lib/kvd/tiers/{{ $tier.name }}/{{ $place }}
      {{- if not (hasKey $source "hostPath") }}
      # By fsGroup the kubelet opens what an earlier pod left there, and the daemon would refuse it.
      find /var/lib/kvd/tiers/{{ $tier.name }}/{{ $place }} -maxdepth 1 -type f -user {{ int64 $.Values.user }} -exec chmod go= {} +
      {{- end }}
      {{- end }}
      {{- end }}
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    readOnlyRootFilesystem: true
    {{- if and .Values.pool.mount (eq .Values.mode "daemonset") }}
    privileged: true # what it mounts shall be the node's
    {{- else }}
    allowPrivilegeEscalation: false
    capabilities: {drop: [ALL], add: [CHOWN, DAC_OVERRIDE, FOWNER]}
    {{- end }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 32Mi}
  volumeMounts:
    {{- if and .Values.pool.mount (eq .Values.mode "daemonset") }}
    - {name: pool, mountPath: /var/lib/kvd/pool, mountPropagation: Bidirectional}
    {{- else }}
    - {name: pool, mountPath: /var/lib/kvd/pool}
    {{- end }}
    - {name: run, mountPath: /run/kvd}
    {{- if .Values.pool.hugePages.size }}
    - {name: extents, mountPath: /var/lib/kvd/extents}
    {{- end }}
    {{- include "kvd.tierMounts" . | nindent 4 }}
{{- end -}}

{{- define "kvd.container" -}}
- name: kvd
  image: {{ include "kvd.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - serve
    - --config=/etc/kvd/kvd.toml
    {{- with .Values.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if or .Values.gpu.enabled .Values.extraEnv }}
  env:
    {{- if .Values.gpu.enabled }}
    # Every GPU of the node, without claiming one: a claimed GPU is lost to the engines.
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    - {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    - {name: http, containerPort: {{ .Values.metrics.port }}, protocol: TCP}
  {{- if eq .Values.mode "daemonset" }}
  startupProbe:
    httpGet: {path: /healthz, port: http}
    {{- with .Values.probes.startup }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  readinessProbe:
    httpGet: {path: /readyz, port: http}
    {{- with .Values.probes.readiness }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- else }}
  # A native sidecar: it starts before the engine and ends after it. It has no probe of its readiness,
  # for an engine is ready without its cache, too.
  restartPolicy: Always
  {{- end }}
  livenessProbe:
    httpGet: {path: /healthz, port: http}
    {{- with .Values.probes.liveness }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext:
    {{- include "kvd.containerSecurityContext" . | nindent 4 }}
  resources:
    {{- include "kvd.resources" . | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/kvd, readOnly: true}
    - {name: pool, mountPath: /var/lib/kvd/pool}
    - {name: run, mountPath: /run/kvd}
    - {name: scratch, mountPath: /tmp}
    {{- if .Values.pool.hugePages.size }}
    - {name: extents, mountPath: /var/lib/kvd/extents}
    {{- end }}
    {{- include "kvd.tierMounts" . | nindent 4 }}
    {{- range $number, $tier := .Values.tiers }}
    {{- if $tier.secretFiles }}
    - {name: tier-{{ $number }}-secrets, mountPath: /etc/kvd-secrets/{{ $tier.name }}, readOnly: true}
    {{- end }}
    {{- end }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "kvd.volumes" -}}
- name: config
  configMap: {name: {{ include "kvd.fullname" . | quote }}}
{{- if eq .Values.mode "sidecar" }}
# They outlive the daemon's container and go with the pod.
- name: pool
  emptyDir: {medium: Memory, sizeLimit: {{ include "kvd.tmpfsMiB" . }}Mi}
- name: run
  emptyDir: {sizeLimit: 1Mi}
{{- with .Values.pool.hugePages.size }}
- name: extents
  emptyDir: {medium: HugePages-{{ . }}}
{{- end }}
{{- else }}
- name: pool
  hostPath: {path: {{ .Values.pool.hostPath | quote }}, type: DirectoryOrCreate}
- name: run
  hostPath: {path: {{ .Values.runDirectory | quote }}, type: DirectoryOrCreate}
{{- if .Values.pool.hugePages.size }}
- name: extents
  hostPath: {path: {{ .Values.pool.hugePages.hostPath | quote }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}
- name: scratch
  emptyDir: {sizeLimit: 64Mi}
{{- range $number, $tier := .Values.tiers }}
{{- range $place, $source := $tier.volumes }}
- name: tier-{{ $number }}-{{ $place }}
  {{- toYaml $source | nindent 2 }}
{{- end }}
{{- if $tier.secretFiles }}
- name: tier-{{ $number }}-secrets
  projected:
    defaultMode: 0444 # of root's; nobody but the daemon is in the container
    sources:
      {{- range $option, $key := $tier.secretFiles }}
      - secret: {name: {{ $key.name | quote }}, items: [{key: {{ $key.key | quote }}, path: {{ $option | quote }}}]}
      {{- end }}
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{- define "kvd.scheduling" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
