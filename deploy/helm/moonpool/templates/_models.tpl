{{- /* The models and their groups of workers, in one shape whether they come from `model` and `workers` or from `models`. */ -}}

{{- /* All models as a JSON list. Each has name (empty without `models`), at (where its `workers` are in the values), source
(keys as those of `model`), names (in requests; the first is the main one), config, and workers by group. */ -}}
{{- define "moonpool.models" -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $source := merge (dict) (omit . "name" "servedNames" "config" "workers") (pick $.Values.model "token" "cache") (dict "path" (printf "/models/%s" .name)) -}}
{{- $models = append $models (dict "name" .name "at" (printf "models.%s.workers" .name) "source" $source "names" (.servedNames | default (list .name)) "config" (.config | default dict) "workers" .workers) -}}
{{- else -}}
{{- $names := .Values.model.servedNames | default (list (include "moonpool.defaultName" .Values.model)) -}}
{{- $models = list (dict "name" "" "at" "workers" "source" .Values.model "names" $names "config" dict "workers" .Values.workers) -}}
{{- end -}}
{{- $models | toJson -}}
{{- end -}}

{{- /* All groups of workers as a JSON list. Each has name, component (unique in the release), at (its place in the values),
model, values, engine, and ownConfig: true if its settings differ from those of other roles. */ -}}
{{- define "moonpool.groups" -}}
{{- $groups := list -}}
{{- range $model := include "moonpool.models" . | fromJsonArray -}}
{{- range $name, $values := $model.workers -}}
{{- if $values -}}
{{- $component := ternary $name (printf "%s-%s" $model.name $name) (empty $model.name) -}}
{{- $engine := $values.engine | default $model.config.engine | default $.Values.config.engine | default "transformer" -}}
{{- $own := or $model.name $values.config | empty | not -}}
{{- $groups = append $groups (dict "name" $name "component" $component "at" (printf "%s.%s" $model.at $name) "model" $model "values" $values "engine" $engine "ownConfig" $own) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end -}}

{{- /* The name in requests of a model without servedNames, from its source. */ -}}
{{- define "moonpool.defaultName" -}}
{{- if eq .source "bundled" -}}
moonpool
{{- else if eq .source "huggingface" -}}
{{- .id -}}
{{- else -}}
{{- base .path -}}
{{- end -}}
{{- end -}}

{{- /* The model in the configuration, from its source; empty for the bundled one. */ -}}
{{- define "moonpool.modelPath" -}}
{{- if eq .source "huggingface" -}}
{{ .id }}{{ with .revision }}@{{ . }}{{ end }}
{{- else if ne .source "bundled" -}}
{{ .path }}
{{- end -}}
{{- end -}}

{{- /* A suffix for the volume and the init container of a model, of which a pod may have several. */ -}}
{{- define "moonpool.modelSuffix" -}}
{{- with .name }}-{{ . }}{{ end -}}
{{- end -}}

{{- /* A group: the file in the release's ConfigMap that its workers read; without a group, that of all other roles. */ -}}
{{- define "moonpool.configFile" -}}
{{- with . }}worker-{{ .component }}{{ else }}moonpool{{ end }}.yaml
{{- end -}}

{{- /* Keys of a model's config that API servers and conductors read; workers read the others. */ -}}
{{- define "moonpool.sharedKeys" -}}
{{- list "ttft_slo" "tbt_slo" "endless_window" "reasoning_parser" "tool_call_parser" | toJson -}}
{{- end -}}

{{- /* Checks of models and groups that the schema cannot express. */ -}}
{{- define "moonpool.checkModels" -}}
{{- if .Values.models -}}
{{- if ne .Values.mode "statefulset" -}}
{{- fail (printf "models needs mode statefulset, got %s: Ray places workers by their role, not by their model, and could start one in a pod of another model's group; set mode to statefulset, or install a release for each model" .Values.mode) -}}
{{- end -}}
{{- if or (ne .Values.model.source "bundled") .Values.model.servedNames .Values.model.id .Values.model.existingClaim .Values.model.hostPath .Values.model.reference .Values.model.subPath .Values.model.revision (ne .Values.model.path "/models/model") -}}
{{- fail "model and models conflict: with models, only model.token and model.cache apply; describe every model in the list" -}}
{{- end -}}
{{- $replaced := dict "prefill" (dict "role" "prefill" "replicas" 1 "pod" dict) "decode" (dict "role" "decode" "replicas" 1 "pod" dict) -}}
{{- if ne (toJson .Values.workers) (toJson $replaced) -}}
{{- fail "workers and models conflict: each model has its own groups; move those of workers below the workers of a model" -}}
{{- end -}}
{{- end -}}
{{- $short := dict -}}
{{- $requested := dict -}}
{{- $mounted := dict -}}
{{- range $model := include "moonpool.models" . | fromJsonArray -}}
{{- if eq $model.name "hub" -}}
{{- fail "models.hub: this name is reserved for the folder of downloaded models; choose another one" -}}
{{- end -}}
{{- if hasKey $short $model.name -}}
{{- fail (printf "models: the name %s is given twice; names of models must differ" $model.name) -}}
{{- end -}}
{{- $_ := set $short $model.name true -}}
{{- range $model.names -}}
{{- if and $model.name (hasKey $requested .) -}}
{{- fail (printf "models: the name %s in requests is given twice, to %s and to %s: change servedNames of one of them" . (get $requested .) $model.name) -}}
{{- end -}}
{{- $_ := set $requested . $model.name -}}
{{- end -}}
{{- $place := ternary (printf "models.%s" $model.name) "model" (not (empty $model.name)) -}}
{{- $needed := dict "pvc" "existingClaim" "hostPath" "hostPath" "imageVolume" "reference" "huggingface" "id" -}}
{{- with get $needed $model.source.source -}}
{{- if not (get $model.source .) -}}
{{- fail (printf "%s.source %s needs %s.%s, which is empty" $place $model.source.source $place .) -}}
{{- end -}}
{{- end -}}
{{- if ne $model.source.source "huggingface" -}}
{{- if hasKey $mounted $model.source.path -}}
{{- fail (printf "models: %s and %s have the same path, %s: each needs its own folder" (get $mounted $model.source.path) $model.name $model.source.path) -}}
{{- end -}}
{{- $_ := set $mounted $model.source.path $model.name -}}
{{- end -}}
{{- $roles := dict -}}
{{- range $model.workers -}}{{- if . -}}{{- $_ := set $roles .role true -}}{{- end -}}{{- end -}}
{{- if not (or $roles.aggregated (and $roles.prefill $roles.decode)) -}}
{{- fail (printf "%s must have a group with role prefill and one with role decode, or one with role aggregated" $model.at) -}}
{{- end -}}
{{- end -}}
{{- include "moonpool.checkGroups" . -}}
{{- end -}}

{{- define "moonpool.checkGroups" -}}
{{- $fullname := include "moonpool.fullname" . -}}
{{- $places := dict -}}
{{- range $group := include "moonpool.groups" . | fromJsonArray -}}
{{- /* Of an object's name or of a component; a LeaderWorkerSet's controller makes a Service with the group's name. */ -}}
{{- if has $group.component (list "conductor" "frontend" "frontend-endpoints" "endpoint-picker" "pool" "redis" "worker" "launcher" "ray" "ray-head" "config") -}}
{{- fail (printf "%s: this name is reserved for another role; choose another one" $group.at) -}}
{{- end -}}
{{- with get $places $group.component -}}
{{- fail (printf "%s and %s have the same name, %s-%s: rename a model or a group" . $group.at $fullname $group.component) -}}
{{- end -}}
{{- $_ := set $places $group.component $group.at -}}
{{- /* Kubernetes adds a hash of 11 characters to the name as a label, and a LeaderWorkerSet an index before it; the sockets of
pods that share memory have the pod's name in their path, of at most 107 characters. */ -}}
{{- $name := printf "%s-%s" $fullname $group.component -}}
{{- if gt (len $name) 46 -}}
{{- fail (printf "%s: the name %s has %d characters, at most 46 are possible: shorten the model's name, the group's, or fullnameOverride" $group.at $name (len $name)) -}}
{{- end -}}
{{- if ne $.Values.mode "statefulset" -}}
{{- range list "config" "image" "leaderWorkerSet" -}}
{{- if hasKey $group.values . -}}
{{- fail (printf "%s.%s needs mode statefulset, got %s: Ray starts the workers of all groups with the same settings, in one image; set mode to statefulset, or omit it" $group.at . $.Values.mode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
