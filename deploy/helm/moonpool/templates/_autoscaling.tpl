{{- /* Autoscalers: of API servers, and of groups of workers by the number of nodes that the conductors compute. */ -}}

{{- /* (root, name, component, apiVersion, kind, autoscaling) */ -}}
{{- define "moonpool.autoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "moonpool.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: {{ .apiVersion }}
    kind: {{ .kind }}
    name: {{ include "moonpool.fullname" .root }}-{{ .name }}
  minReplicas: {{ int .autoscaling.minReplicas }}
  maxReplicas: {{ int .autoscaling.maxReplicas }}
  metrics:
    {{- toYaml .autoscaling.metrics | nindent 4 }}
  {{- with .autoscaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* A group's values: "true" if an autoscaler sets its number of workers, else empty. */ -}}
{{- define "moonpool.isScaled" -}}
{{- $autoscaling := .autoscaling | default dict -}}
{{- if or $autoscaling.enabled ($autoscaling.keda | default dict).enabled -}}true{{- end -}}
{{- end -}}

{{- /* (root, name, apiVersion, kind, isScaled, replicas): a workload's `replicas`. Omitted with an autoscaler, unless the workload exists
with a number that is Helm's own: once Helm omits that, Kubernetes sets 1, so the present number is repeated. A Helm that applies on
the server loses the number to the autoscaler's first change, and must not repeat it from then on: changed again meanwhile, it would be
a conflict. Without a cluster (helm template), nothing exists. */ -}}
{{- define "moonpool.workloadReplicas" -}}
{{- if not .isScaled -}}
replicas: {{ int .replicas }}
{{- else -}}
{{- with lookup .apiVersion .kind .root.Release.Namespace (printf "%s-%s" (include "moonpool.fullname" .root) .name) -}}
{{- $isOthers := false -}}
{{- range .metadata.managedFields -}}
{{- $spec := get (.fieldsV1 | default dict) "f:spec" -}}
{{- if and (eq .operation "Apply") $spec (not (hasKey $spec "f:replicas")) -}}{{- $isOthers = true -}}{{- end -}}
{{- end -}}
{{- if not $isOthers -}}
replicas: {{ int .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* (root, group): the group's autoscaler; empty without one. */ -}}
{{- define "moonpool.workerScaler" -}}
{{- $autoscaling := .group.values.autoscaling | default dict -}}
{{- $target := dict "apiVersion" "apps/v1" "kind" "StatefulSet" -}}
{{- if .group.values.leaderWorkerSet -}}
{{- $target = dict "apiVersion" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet" -}}
{{- end -}}
{{- /* Workers of a replica. */ -}}
{{- $size := int (.group.values.leaderWorkerSet | default (dict "size" 1)).size -}}
{{- /* The conductor already delays its requests for fewer workers. */ -}}
{{- $behavior := dict "scaleDown" (dict "stabilizationWindowSeconds" 0) -}}
{{- $name := dict "root" .root "name" .group.component "component" .group.component -}}
{{- if $autoscaling.enabled -}}
{{- $selected := dict "model_name" (first .group.model.names) "role" .group.values.role -}}
{{- $metric := dict "name" "moonpool_desired_nodes" "selector" (dict "matchLabels" $selected) -}}
{{- $external := dict "metric" $metric "target" (dict "type" "AverageValue" "averageValue" (toString $size)) -}}
{{- $all := merge (dict) $autoscaling (dict "metrics" (list (dict "type" "External" "external" $external)) "behavior" $behavior) -}}
{{- include "moonpool.autoscaler" (merge (dict "autoscaling" $all) $target $name) -}}
{{- else if ($autoscaling.keda | default dict).enabled -}}
{{- $keda := .root.Values.keda -}}
{{- $metadata := dict "serverAddress" $keda.serverAddress "query" (include "moonpool.desiredNodes" .) "threshold" (toString $size) -}}
{{- /* Without the conductors' series, the number of workers stays. */ -}}
{{- $_ := set $metadata "ignoreNullValues" "false" -}}
{{- $trigger := dict "type" "prometheus" "metadata" (merge (dict) $keda.triggerMetadata $metadata) -}}
{{- if $keda.authenticationRef.name -}}{{- $_ := set $trigger "authenticationRef" $keda.authenticationRef -}}{{- end -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "moonpool.metadata" $name | nindent 2 }}
spec:
  scaleTargetRef:
    {{- toYaml (merge (dict "name" (printf "%s-%s" (include "moonpool.fullname" .root) .group.component)) $target) | nindent 4 }}
  pollingInterval: {{ int $keda.pollingInterval }}
  minReplicaCount: {{ int $autoscaling.minReplicas }}
  maxReplicaCount: {{ int $autoscaling.maxReplicas }}
  {{- with $autoscaling.keda.fallback }}
  fallback:
    failureThreshold: {{ int .failureThreshold }}
    replicas: {{ int .replicas }}
  {{- end }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- toYaml $behavior | nindent 8 }}
  triggers:
    {{- toYaml (list $trigger) | nindent 4 }}
{{- end -}}
{{- end -}}

{{- /* (root, group): PromQL for the number of workers that the group needs. Every conductor of the release computes the number for
model and role; other groups of the role without an autoscaler have a part of it. */ -}}
{{- define "moonpool.desiredNodes" -}}
{{- $labels := printf "namespace=%q,pod=~%q" .root.Release.Namespace (printf "%s-conductor-[0-9]+" (include "moonpool.fullname" .root)) -}}
{{- $labels = printf "%s,model_name=%q,role=%q" $labels (first .group.model.names) .group.values.role -}}
{{- $others := 0 -}}
{{- range include "moonpool.groups" .root | fromJsonArray -}}
{{- if and (eq .model.name $.group.model.name) (eq .values.role $.group.values.role) (ne .name $.group.name) -}}
{{- $others = add $others (mul (include "moonpool.replicas" .values | int) (int (.values.leaderWorkerSet | default (dict "size" 1)).size)) -}}
{{- end -}}
{{- end -}}
{{- $all := printf "max(moonpool:desired_nodes{%s})" $labels -}}
{{- ternary (printf "clamp_min(%s - %d, 0)" $all $others) $all (gt (int $others) 0) -}}
{{- end -}}

{{- /* Checks of autoscalers that the schema cannot express. */ -}}
{{- define "moonpool.checkScaling" -}}
{{- range list "serverAddress" "query" "threshold" "ignoreNullValues" -}}
{{- if hasKey $.Values.keda.triggerMetadata . -}}
{{- fail (printf "keda.triggerMetadata must not contain %s, which the chart sets: the query follows from the group, the address is keda.serverAddress" .) -}}
{{- end -}}
{{- end -}}
{{- $groups := include "moonpool.groups" . | fromJsonArray -}}
{{- range $group := $groups -}}
{{- $autoscaling := .values.autoscaling | default dict -}}
{{- $kedaValues := $autoscaling.keda | default dict -}}
{{- $keda := $kedaValues.enabled -}}
{{- if and $keda $autoscaling.enabled -}}
{{- fail (printf "%s.autoscaling: enabled (a HorizontalPodAutoscaler) and keda.enabled conflict, since both would set the number of workers: set one of them to false" .at) -}}
{{- end -}}
{{- if include "moonpool.isScaled" .values -}}
{{- range list "minReplicas" "maxReplicas" -}}
{{- if not (hasKey $autoscaling .) -}}
{{- fail (printf "%s.autoscaling.%s is missing: set the smallest and the largest number of workers" $group.at .) -}}
{{- end -}}
{{- end -}}
{{- if gt (int $autoscaling.minReplicas) (int $autoscaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling: minReplicas is %d, maxReplicas must not be smaller, got %d" .at (int $autoscaling.minReplicas) (int $autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $.Values.mode "kuberay") (or $keda $autoscaling.metrics) -}}
{{- fail (printf "%s.autoscaling.%s needs mode statefulset, got kuberay: there Ray's autoscaler adds pods for workers that the launcher starts; use autoscaling.enabled with minReplicas and maxReplicas" .at (ternary "keda" "metrics" (not (not $keda)))) -}}
{{- end -}}
{{- if and $keda $autoscaling.metrics -}}
{{- fail (printf "%s.autoscaling: metrics and keda.enabled conflict, since a ScaledObject follows the conductors alone: omit metrics, or use enabled in place of keda.enabled" .at) -}}
{{- end -}}
{{- if and $autoscaling.enabled $kedaValues.fallback -}}
{{- fail (printf "%s.autoscaling: keda.fallback and enabled conflict, since a HorizontalPodAutoscaler and Ray's autoscaler have no fallback: omit it, or use keda.enabled in place of enabled" .at) -}}
{{- end -}}
{{- /* Whether the group has as many workers as the conductors compute, and by which value. */ -}}
{{- $follows := or $keda (and $autoscaling.enabled (not $autoscaling.metrics)) -}}
{{- $by := printf "%s.autoscaling%s" .at (ternary ".keda" "" (not (not $keda))) -}}
{{- if and $follows (eq ($.Values.config.role_switching | default "off") "act") -}}
{{- fail (printf "%s.autoscaling and config.role_switching act conflict, since both respond to the same demand: omit one of them" .at) -}}
{{- end -}}
{{- if and $keda (not $.Values.keda.serverAddress) -}}
{{- fail (printf "%s.autoscaling.keda needs keda.serverAddress, which is empty: set it to the URL of the Prometheus that scrapes the conductors" .at) -}}
{{- end -}}
{{- /* Ray's launcher adds the bounds of a role's groups. */ -}}
{{- if and $follows (eq $.Values.mode "statefulset") -}}
{{- range $groups -}}
{{- if and (ne .at $group.at) (eq .model.name $group.model.name) (eq .values.role $group.values.role) (include "moonpool.isScaled" .values) -}}
{{- fail (printf "%s conflicts with %s.autoscaling: both groups have the role %s, and each would get all nodes that the demand requires; scale one of them" $by .at $group.values.role) -}}
{{- end -}}
{{- end -}}
{{- if eq .values.role "aggregated" -}}
{{- range .model.workers -}}
{{- if . -}}{{- if ne .role "aggregated" -}}
{{- fail (printf "%s needs a model with aggregated workers only, but it has a group with role %s: next to those, conductors compute no number of aggregated nodes; scale the other groups" $by .role) -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
