{{- /* One value as TOML. Numbers of YAML come as floats; whole ones are written whole. */ -}}
{{- define "kvd.tomlValue" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- /* kvd.toml: what the chart decides, then .Values.config, then the tenants. */ -}}
{{- define "kvd.toml" -}}
socket = "/run/kvd/kvd.sock"
pool_directory = "/var/lib/kvd/pool"
{{- if .Values.pool.hugePages.size }}
extents_directory = "/var/lib/kvd/extents"
{{- end }}
pool_bytes = "{{ .Values.pool.sizeGiB }}GiB"
http_address = "0.0.0.0"
http_port = {{ .Values.metrics.port }}
{{- range $name, $value := .Values.config }}
{{- if ne $name "tenants" }}
{{ $name }} = {{ include "kvd.tomlValue" $value }}
{{- end }}
{{- end }}
{{- range $tenant, $rule := .Values.config.tenants }}

[tenants.{{ toJson $tenant }}]
{{- range $name, $value := $rule }}
{{ $name }} = {{ include "kvd.tomlValue" $value }}
{{- end }}
{{- end }}
{{- end -}}
