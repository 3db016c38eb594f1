{{- /* Groups of workers with vLLM as their engine (docs/vllm.md). */ -}}

{{- /* (root, model): the engine of all groups of the model, which is the same. */ -}}
{{- define "moonpool.engine" -}}
{{- $engines := list -}}
{{- range include "moonpool.groups" .root | fromJsonArray -}}
{{- if eq .model.name $.model.name -}}{{- $engines = append $engines .engine -}}{{- end -}}
{{- end -}}
{{- first $engines -}}
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
{{- $groups := include "moonpool.groups" . | fromJsonArray -}}
{{- range $model := include "moonpool.models" . | fromJsonArray -}}
{{- $engines := list -}}
{{- $said := list -}}
{{- range $groups -}}
{{- if eq .model.name $model.name -}}
{{- $engines = append $engines .engine | uniq -}}
{{- $said = append $said (printf "%s has %s" .name .engine) -}}
{{- end -}}
{{- end -}}
{{- if gt (len $engines) 1 -}}
{{- fail (printf "%s must have the same engine in all groups, since they serve one model, got %s: change one of them, or remove a group by setting it to null" $model.at (join ", " $said)) -}}
{{- end -}}
{{- end -}}
{{- range $group := $groups -}}
{{- if eq .engine "vllm" -}}
{{- include "moonpool.checkVllm" (dict "root" $ "at" .at "group" .values) -}}
{{- else -}}
{{- range list "tensorParallelSize" "vllmArgs" "shmSize" "startupProbe" -}}
{{- if hasKey $group.values . -}}
{{- fail (printf "%s.%s needs the engine vllm, got %s: set %s.engine to vllm, or omit it" $group.at . $group.engine $group.at) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* (root, at, group): checks of a group with engine vllm. */ -}}
{{- define "moonpool.checkVllm" -}}
{{- $at := .at -}}
{{- if ne .root.Values.mode "statefulset" -}}
{{- fail (printf "%s: engine vllm needs mode statefulset, got %s: Ray gives each worker one GPU and runs all of them in one image; set mode to statefulset" $at .root.Values.mode) -}}
{{- end -}}
{{- if .root.Values.config.vllm_args -}}
{{- fail (printf "config.vllm_args conflicts with %s, which passes on its own arguments: give them in %s.vllmArgs" $at $at) -}}
{{- end -}}
{{- $size := int (.group.tensorParallelSize | default 1) -}}
{{- $gpus := include "moonpool.namedGpus" (mergeOverwrite (deepCopy .root.Values.workerPod) (deepCopy (.group.pod | default dict))) -}}
{{- if and $gpus (not (has (int $gpus) (list 0 $size))) -}}
{{- $remedy := printf "they must be equal (or omit nvidia.com/gpu, which then follows tensorParallelSize); for more workers raise %s.replicas" $at -}}
{{- if .group.leaderWorkerSet -}}
{{- $remedy = "they must be equal: each pod of a LeaderWorkerSet is a whole worker, since vLLM's processes and the KV slots of a worker share the memory of one host; set tensorParallelSize to the GPUs of one pod" -}}
{{- end -}}
{{- fail (printf "%s.tensorParallelSize is %d, but its pod's resources name nvidia.com/gpu: %s: %s" $at $size $gpus $remedy) -}}
{{- end -}}
{{- $refused := .root.Files.Get "files/vllm-arguments.yaml" | fromYaml -}}
{{- range include "moonpool.vllmWords" (.group.vllmArgs | default list) | fromJsonArray -}}
{{- if regexMatch "^-" . -}}
{{- $argument := index (splitList "=" .) 0 -}}
{{- $key := regexReplaceAll "^-+(no-)?([^.]*).*$" (replace "_" "-" $argument) "${2}" -}}
{{- with get $refused $key -}}
{{- fail (printf "%s.vllmArgs must not contain %s: %s" $at $argument .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
