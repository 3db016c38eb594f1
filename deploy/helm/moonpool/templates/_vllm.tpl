{{- /* Groups of workers with vLLM as their engine (docs/vllm.md). */ -}}

{{- /* Engine of each group, by the group's name, as JSON. */ -}}
{{- define "moonpool.engines" -}}
{{- $engines := dict -}}
{{- range $name, $group := .Values.workers -}}
{{- if $group -}}{{- $_ := set $engines $name ($group.engine | default $.Values.config.engine | default "transformer") -}}{{- end -}}
{{- end -}}
{{- $engines | toJson -}}
{{- end -}}

{{- /* The engine of all groups, which is the same. */ -}}
{{- define "moonpool.engine" -}}
{{- include "moonpool.engines" . | fromJson | values | uniq | first -}}
{{- end -}}

{{- /* (root, group, pod): what a pod of the group has beside that of other engines, as JSON: image, gpus, shmSize. A number
of GPUs that the pod's own resources name stays as it is. */ -}}
{{- define "moonpool.vllmPod" -}}
{{- $values := .root.Values -}}
{{- $found := dict "image" (.group.image | default $values.image.vllm) "shmSize" (.group.shmSize | default $values.vllm.shmSize) -}}
{{- if not (include "moonpool.namedGpus" .pod) -}}
{{- $_ := set $found "gpus" (int (.group.tensorParallelSize | default 1)) -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{- /* Number of GPUs in a pod's resources; empty if they name none. */ -}}
{{- define "moonpool.namedGpus" -}}
{{- $resources := .resources | default dict -}}
{{- $all := merge (dict) ($resources.limits | default dict) ($resources.requests | default dict) -}}
{{- if hasKey $all "nvidia.com/gpu" -}}{{- get $all "nvidia.com/gpu" | int -}}{{- end -}}
{{- end -}}

{{- /* (group, pod): flags of a worker. Without GPUs it computes on the CPU. */ -}}
{{- define "moonpool.vllmFlags" -}}
{{- $words := list (printf "--tensor-parallel-size=%d" (int (.group.tensorParallelSize | default 1))) -}}
{{- $words = concat $words (include "moonpool.vllmWords" (.group.vllmArgs | default list) | fromJsonArray) -}}
{{- $quoted := list -}}
{{- range $words -}}
{{- /* As a shell reads it, which is how a worker splits the text. */ -}}
{{- $quoted = append $quoted (ternary . (printf "'%s'" (replace "'" "'\"'\"'" .)) (regexMatch "^[A-Za-z0-9@%+=:,./_-]+$" .)) -}}
{{- end -}}
- --device={{ ternary "cpu" "cuda" (eq (include "moonpool.namedGpus" .pod) "0") }}
- {{ printf "--vllm-args=%s" (join " " $quoted) | quote }}
{{- end -}}

{{- /* The words of vllmArgs, a list of words or a map from arguments to values, as JSON. */ -}}
{{- define "moonpool.vllmWords" -}}
{{- $words := list -}}
{{- if kindIs "slice" . -}}
{{- $words = . -}}
{{- else -}}
{{- range $name, $value := . -}}
{{- if kindIs "bool" $value -}}
{{- $words = append $words (printf "--%s%s" (ternary "" "no-" $value) $name) -}}
{{- else if kindIs "slice" $value -}}
{{- $words = append $words (printf "--%s" $name) -}}
{{- range $value -}}{{- $words = append $words (include "moonpool.vllmText" .) -}}{{- end -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $words = append $words (printf "--%s=%s" $name (include "moonpool.vllmText" $value)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $words | toRawJson -}}
{{- end -}}

{{- /* A value as vLLM reads it. Helm reads integers as floats, and would write large ones as 2e+06. */ -}}
{{- define "moonpool.vllmText" -}}
{{- if kindIs "map" . -}}
{{- . | toRawJson -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- define "moonpool.checkEngines" -}}
{{- $engines := include "moonpool.engines" . | fromJson -}}
{{- if gt ($engines | values | uniq | len) 1 -}}
{{- $said := list -}}
{{- range $name, $engine := $engines -}}{{- $said = append $said (printf "%s has %s" $name $engine) -}}{{- end -}}
{{- fail (printf "workers must have the same engine in all groups, since they serve one model, got %s: change one of them, or remove a group by setting it to null" (join ", " $said)) -}}
{{- end -}}
{{- range $name, $engine := $engines -}}
{{- $group := get $.Values.workers $name -}}
{{- if eq $engine "vllm" -}}
{{- include "moonpool.checkVllm" (dict "root" $ "name" $name "group" $group) -}}
{{- else -}}
{{- range list "tensorParallelSize" "vllmArgs" "image" "shmSize" "startupProbe" -}}
{{- if hasKey $group . -}}
{{- fail (printf "workers.%s.%s needs the engine vllm, got %s: set workers.%s.engine to vllm, or omit it" $name . $engine $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* (root, name, group): checks of a group with engine vllm. */ -}}
{{- define "moonpool.checkVllm" -}}
{{- $name := .name -}}
{{- if ne .root.Values.mode "statefulset" -}}
{{- fail (printf "workers.%s: engine vllm needs mode statefulset, got %s: Ray gives each worker one GPU and runs all of them in one image; set mode to statefulset" $name .root.Values.mode) -}}
{{- end -}}
{{- if .root.Values.config.vllm_args -}}
{{- fail (printf "config.vllm_args conflicts with workers.%s, which passes on its own arguments: give them in workers.%s.vllmArgs" $name $name) -}}
{{- end -}}
{{- $size := int (.group.tensorParallelSize | default 1) -}}
{{- $gpus := include "moonpool.namedGpus" (mergeOverwrite (deepCopy .root.Values.workerPod) (deepCopy (.group.pod | default dict))) -}}
{{- if and $gpus (not (has (int $gpus) (list 0 $size))) -}}
{{- fail (printf "workers.%s.tensorParallelSize is %d, but its pod's resources name nvidia.com/gpu: %s: they must be equal (or omit nvidia.com/gpu, which then follows tensorParallelSize); for more workers raise workers.%s.replicas" $name $size $gpus $name) -}}
{{- end -}}
{{- $refused := .root.Files.Get "files/vllm-arguments.yaml" | fromYaml -}}
{{- range include "moonpool.vllmWords" (.group.vllmArgs | default list) | fromJsonArray -}}
{{- if regexMatch "^-" . -}}
{{- $argument := index (splitList "=" .) 0 -}}
{{- $key := regexReplaceAll "^-+(no-)?([^.]*).*$" (replace "_" "-" $argument) "${2}" -}}
{{- with get $refused $key -}}
{{- fail (printf "workers.%s.vllmArgs must not contain %s: %s" $name $argument .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
