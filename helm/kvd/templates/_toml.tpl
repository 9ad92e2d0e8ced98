{{- /* One value as TOML. Numbers of YAML come as floats; whole ones are written whole, where they can be. */ -}}
{{- define "kvd.tomlValue" -}}
{{- if kindIs "float64" . -}}
{{- if and (eq (floor .) .) (lt . 9e18) (gt . -9e18) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- /* kvd.toml: what the chart decides, then .Values.config, then the tenants. */ -}}
{{- /* What of a tier is the daemon's; volumes are its directories, secrets its files. */ -}}
{{- define "kvd.tierToml" -}}
{{- $tier := . }}
[[tiers]]
{{- range $name, $value := omit $tier "options" "volumes" "secretFiles" }}
{{ $name }} = {{ include "kvd.tomlValue" $value }}
{{- end }}

[tiers.options]
{{- if $tier.volumes }}
directories = {{ include "kvd.tierDirectories" $tier }}
{{- end }}
{{- range $name, $value := $tier.options }}
{{ toJson $name }} = {{ include "kvd.tomlValue" $value }}
{{- end }}
{{- range $name, $key := $tier.secretFiles }}
{{ toJson $name }} = {{ printf "/etc/kvd-secrets/%s/%s" $tier.name $name | toJson }}
{{- end }}
{{- end -}}

{{- define "kvd.tierDirectories" -}}
{{- $paths := list -}}
{{- range $place, $source := .volumes -}}
{{- $paths = append $paths (printf "/var/lib/kvd/tiers/%s/%d" $.name $place) -}}
{{- end -}}
{{- toJson $paths -}}
{{- end -}}

{{- define "kvd.toml" -}}
socket = "/run/kvd/kvd.sock"
pool_directory = "/var/lib/kvd/pool"
{{- if .Values.pool.hugePages.size }}
extents_directory = "/var/lib/kvd/extents"
{{- end }}
pool_bytes = "{{ .Values.pool.sizeGiB }}GiB"
http_address = "::"
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
{{- range .Values.tiers }}
{{ include "kvd.tierToml" . }}
{{- end }}
{{- end -}}
