{{- /* A name in so many letters: what is cut off may begin behind a dot or a dash, which end no name. */ -}}
{{- define "kvd.cut" -}}
{{- regexReplaceAll "[-.]+$" (index . 0 | trunc (index . 1)) "" -}}
{{- end -}}

{{- define "kvd.name" -}}
{{- include "kvd.cut" (list (default .Chart.Name .Values.nameOverride) 63) -}}
{{- end -}}

{{- define "kvd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- include "kvd.cut" (list .Values.fullnameOverride 63) -}}
{{- else if contains (include "kvd.name" .) .Release.Name -}}
{{- include "kvd.cut" (list .Release.Name 63) -}}
{{- else -}}
{{- include "kvd.cut" (list (printf "%s-%s" .Release.Name (include "kvd.name" .)) 63) -}}
{{- end -}}
{{- end -}}

{{- define "kvd.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvd.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* Of both modes alike: Kubernetes lets no upgrade change what a Deployment's pods are found by. */ -}}
{{- define "kvd.engineSelector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
kvd/engine-of: {{ include "kvd.fullname" . | quote }}
{{- end -}}

{{- /* Of an engine's pod; in a sidecar's it is the daemon's pod, too, and is scraped as such. */ -}}
{{- define "kvd.engineLabels" -}}
{{- if eq .Values.mode "sidecar" -}}
{{ include "kvd.selectorLabels" . }}
{{- else -}}
app.kubernetes.io/name: {{ include "kvd.cut" (list (include "kvd.name" .) 56) }}-engine
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}
app.kubernetes.io/component: engine
kvd/engine-of: {{ include "kvd.fullname" . | quote }}
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

{{- define "kvd.engineImage" -}}
{{- with .Values.engine.image -}}
{{- if .digest -}}{{ printf "%s@%s" .repository .digest }}{{- else -}}{{ printf "%s:%s" .repository .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Pool, unless it lies in huge pages; tables (1/28 of it) and index pages (1/64); headroom. */ -}}
{{- define "kvd.memory" -}}
{{- $pool := int .Values.pool.sizeGiB -}}
{{- $common := ternary 0 $pool (not (empty .Values.pool.hugePages.size)) -}}
{{- printf "%dGi" (add $common (div $pool 19) 1 (int .Values.pool.headroomGiB)) -}}
{{- end -}}

{{- /* Size of the tmpfs: tables, reserve and, unless they lie in huge pages, the blocks. */ -}}
{{- define "kvd.tmpfsMiB" -}}
{{- $pool := mul (int .Values.pool.sizeGiB) 1024 -}}
{{- $common := ternary 0 $pool (not (empty .Values.pool.hugePages.size)) -}}
{{- add $common (div $pool 28) 64 -}}
{{- end -}}

{{- /* Without a claim on huge pages the kubelet lets the pod have none at all. */ -}}
{{- /* The pod's memory: what the values say of it, and for the rest what the pool needs. What they say
       of memory in one place alone counts in both: a limit below the request would be refused. */ -}}
{{- define "kvd.resources" -}}
{{- $memory := dict "memory" (include "kvd.memory" .) -}}
{{- with .Values.pool.hugePages.size -}}
{{- $_ := set $memory (printf "hugepages-%s" .) (printf "%dGi" (int $.Values.pool.sizeGiB)) -}}
{{- end -}}
{{- $requests := merge (dict "cpu" "1") $memory -}}
{{- $limits := deepCopy $memory -}}
{{- $given := deepCopy (default dict .Values.resources) -}}
{{- $asked := default dict $given.requests -}}
{{- $capped := default dict $given.limits -}}
{{- range $name, $_ := $memory -}}
{{- if and (get $asked $name) (not (hasKey $capped $name)) -}}
{{- $_ := set $limits $name (get $asked $name) -}}
{{- else if and (get $capped $name) (not (hasKey $asked $name)) -}}
{{- $_ := set $requests $name (get $capped $name) -}}
{{- end -}}
{{- end -}}
{{- /* The cluster would refuse the daemon's share of a processor above a limit that is less. */ -}}
{{- with $capped.cpu -}}
{{- $cpu := toString . -}}
{{- $unit := regexFind "[A-Za-z]+$" $cpu -}}
{{- $in := dict "" 1e3 "m" 1.0 "u" 1e-3 "n" 1e-6 -}}
{{- $milli := mulf (ternary (get $in $unit) 1e6 (hasKey $in $unit)) (float64 (trimSuffix $unit $cpu)) -}}
{{- if lt $milli 1000.0 -}}
{{- $_ := set $requests "cpu" . -}}
{{- end -}}
{{- end -}}
{{- $whole := dict "requests" (mergeOverwrite $requests $asked) "limits" (mergeOverwrite $limits $capped) -}}
{{- /* The cluster would take nothing behind a name for 0. */ -}}
{{- range $kind, $amounts := $whole -}}
{{- range $name, $amount := $amounts -}}
{{- if kindIs "invalid" $amount -}}
{{- $_ := unset $amounts $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (merge $whole (omit $given "requests" "limits")) -}}
{{- end -}}

{{- /* What would render, and never run as it should. */ -}}
{{- define "kvd.refuse" -}}
{{- $extent := include "kvd.tomlValue" (default "auto" .Values.config.extent_bytes) | trimAll "\"" -}}
{{- $units := dict "" 1.0 "b" 1.0 "kib" 1024.0 "mib" 1048576.0 "gib" 1073741824.0 "tib" 1099511627776.0 "kb" 1e3 "mb" 1e6 "gb" 1e9 "tb" 1e12 -}}
{{- $unit := regexFind "[A-Za-z]*$" (trim $extent) | lower -}}
{{- $pages := divf (mulf (float64 (regexFind "[0-9.]+" $extent)) (ternary (get $units $unit) 0.0 (hasKey $units $unit))) 1073741824.0 -}}
{{- $whole := and (ge $pages 1.0) (eq $pages (floor $pages)) -}}
{{- if and (eq .Values.pool.hugePages.size "1Gi") (not $whole) -}}
{{- fail (printf "pool.hugePages.size is 1Gi: an extent must be whole huge pages, but config.extent_bytes is %s; set it to 1GiB" $extent) -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "mode is sidecar, and the cluster is Kubernetes %s: only 1.29 and later know native sidecars, and the pod would wait for its daemon's end; set mode to daemonset" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $surge := toString (default 0 (dig "rollingUpdate" "maxSurge" 0 .Values.updateStrategy)) -}}
{{- if and (eq .Values.mode "daemonset") (not (has $surge (list "0" "0%"))) -}}
{{- fail (printf "updateStrategy.rollingUpdate.maxSurge is %s: a node's new daemon can't have the pool, which the old one keeps until the new one is ready; set it to 0" $surge) -}}
{{- end -}}
{{- $drain := ternary (toString .Values.config.drain_seconds) "10" (hasKey .Values.config "drain_seconds") | float64 -}}
{{- if lt (float64 .Values.terminationGracePeriodSeconds) (addf $drain 5) -}}
{{- fail (printf "terminationGracePeriodSeconds is %v, and the daemon drains for up to %v s (config.drain_seconds): it would be killed; give it 5 s more than that at least" .Values.terminationGracePeriodSeconds $drain) -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") (eq (int .Values.metrics.port) 8000) -}}
{{- fail "metrics.port is 8000, at which the engine in the sidecar's pod serves: set it to another, such as 9470" -}}
{{- end -}}
{{- include "kvd.refuseUnheeded" . -}}
{{- include "kvd.refuseUsers" . -}}
{{- include "kvd.refuseLabels" . -}}
{{- include "kvd.refuseTiers" . -}}
{{- include "kvd.refuseVolumes" . -}}
{{- include "kvd.refuseSettings" . -}}
{{- end -}}

{{- /* What counts for the DaemonSet alone, where it is not as in values.yaml. */ -}}
{{- define "kvd.refuseUnheeded" -}}
{{- if eq .Values.mode "sidecar" -}}
{{- $unheeded := list
  (list "pool.hostPath" .Values.pool.hostPath "/var/lib/kvd/pool" "the pool goes with its pod")
  (list "pool.hugePages.hostPath" .Values.pool.hugePages.hostPath "/dev/hugepages/kvd" "the pool goes with its pod")
  (list "runDirectory" .Values.runDirectory "/run/kvd" "the sockets go with their pod")
  (list "hostPID" .Values.hostPID false "the pod's containers share a process namespace of their own")
  (list "podSecurityContext" .Values.podSecurityContext dict "the pod is the engine's: set engine.podSecurityContext")
  (list "updateStrategy" .Values.updateStrategy (dict "type" "RollingUpdate" "rollingUpdate" (dict "maxUnavailable" 1)) "the engines' Deployment has the cluster's default")
  (list "probes.startup" .Values.probes.startup (dict "periodSeconds" 2 "failureThreshold" 150) "an engine need not wait for its daemon")
  (list "probes.readiness" .Values.probes.readiness (dict "periodSeconds" 5 "timeoutSeconds" 2 "failureThreshold" 2) "an engine is ready without its cache, too")
-}}
{{- range $unheeded -}}
{{- if ne (toJson (index . 1)) (toJson (index . 2)) -}}
{{- fail (printf "%s is for mode daemonset, and would be ignored in a sidecar: %s; leave it out" (index . 0) (index . 3)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The directories are given to user and group: the daemon refuses those of others, or shuts out who has the sockets. */ -}}
{{- define "kvd.refuseUsers" -}}
{{- $ours := dict "runAsUser" (list "user" .Values.user) "runAsGroup" (list "group" .Values.group) -}}
{{- range $place := list "podSecurityContext" "containerSecurityContext" -}}
{{- range $key, $given := pick (default dict (get $.Values $place)) "runAsUser" "runAsGroup" -}}
{{- $name := first (get $ours $key) -}}
{{- $value := last (get $ours $key) -}}
{{- if ne (toJson $given) (toJson $value) -}}
{{- fail (printf "%s.%s is %s, but the directories belong to %s %d, whom the daemon must run as: leave it out, and set %s" $place $key (toJson $given) $name (int64 $value) $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.config.socket_group -}}
{{- if ne (toString .) (toString (int64 $.Values.group)) -}}
{{- fail (printf "config.socket_group is %s, but the daemon and its sockets' directory are of group %d, which engines' pods join: leave it out, and set group" . (int64 $.Values.group)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A key or a name twice, with which the daemon would not start, and a disk that is nowhere. */ -}}
{{- define "kvd.refuseTiers" -}}
{{- $names := list -}}
{{- range .Values.tiers -}}
{{- $options := default dict .options -}}
{{- if has .name $names -}}
{{- fail (printf "tiers has two of the name %s: rename one" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if and .volumes (hasKey $options "directories") -}}
{{- fail (printf "tier %s has options.directories beside volumes, of which the chart makes them: leave one of the two out" .name) -}}
{{- end -}}
{{- if and (eq (toString .kind) "disk") (not .volumes) (not $options.directories) -}}
{{- fail (printf "tier %s is a disk without a directory: give it volumes" .name) -}}
{{- end -}}
{{- range $option, $_ := .secretFiles -}}
{{- if hasKey $options $option -}}
{{- fail (printf "a tier has %s among options and secretFiles: leave one of the two out" $option) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Flags and variables count before kvd.toml, which has what probes, mounts and memory go by. */ -}}
{{- define "kvd.refuseSettings" -}}
{{- $places := dict "config" "config" "socket" "runDirectory" "pool_directory" "pool.hostPath" "extents_directory" "pool.hugePages.hostPath" "pool_bytes" "pool.sizeGiB" "extent_bytes" "config.extent_bytes" "http_address" "metrics" "http_port" "metrics.port" "drain_seconds" "config.drain_seconds" -}}
{{- range $name, $place := $places -}}
{{- $flag := printf "--%s" (replace "_" "-" $name) -}}
{{- include "kvd.refuseFlag" (list "extraArgs" $.Values.extraArgs $flag $place) -}}
{{- $variable := printf "KVD_%s" (upper $name) -}}
{{- range $.Values.extraEnv -}}
{{- if eq .name $variable -}}
{{- fail (printf "extraEnv has %s, which would count before what the chart sets: leave it out, and set %s" $variable $place) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $flag := list "--check" "--print-config" -}}
{{- include "kvd.refuseFlag" (list "extraArgs" $.Values.extraArgs $flag "nothing: the daemon would not serve") -}}
{{- end -}}
{{- $env := default list (include "kvd.container" . | fromYamlArray | first).env -}}
{{- include "kvd.refuseTwice" (list "extraEnv" "name" $env) -}}
{{- if or .Values.engine.enabled (eq .Values.mode "sidecar") -}}
{{- include "kvd.refuseFlag" (list "engine.extraArgs" .Values.engine.extraArgs "--port" "nothing: the probes ask 8000") -}}
{{- include "kvd.refuseFlag" (list "engine.extraArgs" .Values.engine.extraArgs "--kv-transfer-config" "connection.vllm") -}}
{{- $theirs := concat (list (dict "name" "KV_TRANSFER_CONFIG")) (default list .Values.engine.extraEnv) -}}
{{- include "kvd.refuseTwice" (list "engine.extraEnv" "name" $theirs) -}}
{{- end -}}
{{- end -}}

{{- define "kvd.refuseFlag" -}}
{{- $flag := index . 2 -}}
{{- range index . 1 -}}
{{- if eq (first (splitList "=" (toString .)) | replace "_" "-") $flag -}}
{{- fail (printf "%s has %s, which would count before what the chart sets: leave it out, and set %s" (index $ 0) $flag (index $ 3)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A key twice: YAML has none, and the cluster takes the last, so that no selector would match. */ -}}
{{- define "kvd.refuseLabels" -}}
{{- $ours := include "kvd.labels" . | fromYaml -}}
{{- range $what := list "prometheusRule" "dashboards" "serviceMonitor" "podMonitor" -}}
{{- include "kvd.refuseKeys" (list (printf "metrics.%s.labels" $what) (get $.Values.metrics $what).labels $ours) -}}
{{- end -}}
{{- $engine := or .Values.engine.enabled (eq .Values.mode "sidecar") -}}
{{- $engineLabels := ternary (include "kvd.engineLabels" . | fromYaml) dict $engine -}}
{{- $daemonLabels := ternary $ours dict (eq .Values.mode "daemonset") -}}
{{- include "kvd.refuseKeys" (list "podLabels" .Values.podLabels (merge (dict) $daemonLabels $engineLabels)) -}}
{{- include "kvd.refuseKeys" (list "podAnnotations" .Values.podAnnotations (dict "kvd/config-digest" "" "kvd/connection-digest" "")) -}}
{{- end -}}

{{- define "kvd.refuseKeys" -}}
{{- $ours := index . 2 -}}
{{- range $key, $_ := index . 1 -}}
{{- if hasKey $ours $key -}}
{{- fail (printf "%s has %s, which the chart sets itself: leave it out" (index $ 0) $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Kubernetes has every volume of a pod, and every path in a container, once. */ -}}
{{- define "kvd.refuseVolumes" -}}
{{- $ours := include "kvd.volumes" . | fromYamlArray -}}
{{- $mounts := (include "kvd.container" . | fromYamlArray | first).volumeMounts -}}
{{- include "kvd.refuseTwice" (list "extraVolumes" "name" $ours) -}}
{{- include "kvd.refuseTwice" (list "extraVolumeMounts" "mountPath" $mounts) -}}
{{- $run := list (dict "name" "run") -}}
{{- $shared := concat (ternary $ours $run (eq .Values.mode "sidecar")) (list (dict "name" "shm")) -}}
{{- $paths := list (dict "mountPath" "/run/kvd") (dict "mountPath" "/dev/shm") -}}
{{- if or .Values.engine.enabled (eq .Values.mode "sidecar") -}}
{{- include "kvd.refuseTwice" (list "engine.extraVolumes" "name" (concat $shared (default list .Values.engine.extraVolumes))) -}}
{{- include "kvd.refuseTwice" (list "engine.extraVolumeMounts" "mountPath" (concat $paths (default list .Values.engine.extraVolumeMounts))) -}}
{{- end -}}
{{- end -}}

{{- define "kvd.refuseTwice" -}}
{{- $name := index . 1 -}}
{{- $found := list -}}
{{- range $one := index . 2 -}}
{{- $value := get $one $name -}}
{{- if has $value $found -}}
{{- $fix := ternary "choose another path" "rename it, or leave it out and mount the one that is there" (eq $name "mountPath") -}}
{{- $fix = ternary "leave one of them out" $fix (hasSuffix "Env" (index $ 0)) -}}
{{- fail (printf "%s has %s %s, and something else has it already: %s" (index $ 0) $name $value $fix) -}}
{{- end -}}
{{- $found = append $found $value -}}
{{- end -}}
{{- end -}}

{{- /* What `vllm serve --kv-transfer-config` takes. */ -}}
{{- define "kvd.transferConfig" -}}
{{- $extra := mergeOverwrite (dict "socket_path" "/run/kvd/kvd.sock") (deepCopy .Values.connection.vllm) -}}
{{- dict "kv_connector" "KvdConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}

{{- define "kvd.tierMounts" -}}
{{- range $number, $tier := .Values.tiers }}
{{- range $place, $source := $tier.volumes }}
- {name: tier-{{ $number }}-{{ $place }}, mountPath: /var/lib/kvd/tiers/{{ $tier.name }}/{{ $place }}}
{{- end }}
{{- end }}
{{- end -}}
