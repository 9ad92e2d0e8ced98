{{- define "kvd.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "kvd.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvd.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvd.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvd.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kvd.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvd.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvd.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvd.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Pool, unless it lies in huge pages; tables (1/28 of it) and index pages (1/64); headroom. */ -}}
{{- define "kvd.memory" -}}
{{- $pool := int .Values.pool.sizeGiB -}}
{{- $common := ternary 0 $pool (ne .Values.pool.hugePages.size "") -}}
{{- printf "%dGi" (add $common (div $pool 19) 1 (int .Values.pool.headroomGiB)) -}}
{{- end -}}

{{- /* Size of the tmpfs: tables, reserve and, unless they lie in huge pages, the blocks. */ -}}
{{- define "kvd.tmpfsMiB" -}}
{{- $pool := mul (int .Values.pool.sizeGiB) 1024 -}}
{{- $common := ternary 0 $pool (ne .Values.pool.hugePages.size "") -}}
{{- add $common (div $pool 28) 64 -}}
{{- end -}}

{{- /* Without such a claim the kubelet lets the pod have no huge page at all. */ -}}
{{- define "kvd.hugePages" -}}
{{- with .Values.pool.hugePages.size -}}
{{- printf ", hugepages-%s: %dGi" . (int $.Values.pool.sizeGiB) -}}
{{- end -}}
{{- end -}}

{{- define "kvd.tierMounts" -}}
{{- range $number, $tier := .Values.tiers }}
{{- range $place, $source := $tier.volumes }}
- {name: tier-{{ $number }}-{{ $place }}, mountPath: /var/lib/kvd/tiers/{{ $tier.name }}/{{ $place }}}
{{- end }}
{{- end }}
{{- end -}}
