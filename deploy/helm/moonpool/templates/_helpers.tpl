{{- /* Names, labels, and configuration of the processes. */ -}}

{{- define "moonpool.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{- /* (root, component): labels that select pods; must not change within a release's life. */ -}}
{{- define "moonpool.selector" -}}
app.kubernetes.io/name: moonpool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "moonpool.labels" -}}
{{ include "moonpool.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* (root, name, component): metadata of an object; `name` is a suffix. */ -}}
{{- define "moonpool.metadata" -}}
name: {{ include "moonpool.fullname" .root }}{{ with .name }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "moonpool.labels" . | nindent 2 }}
{{- end -}}

{{- /* Number of a group's workers, 1 by default. */ -}}
{{- define "moonpool.replicas" -}}
{{- if hasKey . "replicas" }}{{ int .replicas }}{{ else }}1{{ end -}}
{{- end -}}

{{- /* (root, image): the pod's own image, by default that of all roles. */ -}}
{{- define "moonpool.image" -}}
{{- with .image | default .root.Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.root.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "moonpool.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "moonpool.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "moonpool.tlsSecret" -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "moonpool.fullname" .)) -}}
{{- end -}}

{{- /* The conductors' addresses as a JSON list, identical everywhere. */ -}}
{{- define "moonpool.conductors" -}}
{{- $service := printf "%s-conductor" (include "moonpool.fullname" .) -}}
{{- $targets := list -}}
{{- range $i := until (int .Values.conductor.replicas) -}}
{{- $targets = append $targets (printf "%s-%d.%s.%s.svc:7000" $service $i $service $.Release.Namespace) -}}
{{- end -}}
{{- $targets | toJson -}}
{{- end -}}

{{- /* The model's name in metrics. */ -}}
{{- define "moonpool.modelName" -}}
{{- if .Values.model.servedNames -}}
{{- first .Values.model.servedNames -}}
{{- else if eq .Values.model.source "bundled" -}}
moonpool
{{- else if eq .Values.model.source "huggingface" -}}
{{- .Values.model.id -}}
{{- else -}}
{{- base .Values.model.path -}}
{{- end -}}
{{- end -}}

{{- /* The model in the configuration; empty for the bundled one. */ -}}
{{- define "moonpool.model" -}}
{{- with .Values.model -}}
{{- if eq .source "huggingface" -}}
{{ .id }}{{ with .revision }}@{{ . }}{{ end }}
{{- else if ne .source "bundled" -}}
{{ .path }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "moonpool.redisUrl" -}}
{{- if .Values.externalRedis.url -}}
{{- .Values.externalRedis.url -}}
{{- else if .Values.redis.enabled -}}
redis://{{ include "moonpool.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- end -}}
{{- end -}}

{{- /* "true" if workers and pool nodes run in the host's network, else empty. */ -}}
{{- define "moonpool.hostNetwork" -}}
{{- if and .Values.rdma.enabled .Values.rdma.hostNetwork -}}true{{- end -}}
{{- end -}}

{{- /* moonpool.yaml: one file for all roles; each ignores the keys of others. */ -}}
{{- define "moonpool.config" -}}
{{- $config := dict "log_format" "json" -}}
{{- range $key, $value := .Values.config -}}
{{- /* Helm reads integers as floats, and would write large ones as 2e+06. */ -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) -}}{{- $value = int64 $value -}}{{- end -}}
{{- $_ := set $config $key $value -}}
{{- end -}}
{{- $engine := include "moonpool.engine" . -}}
{{- if ne $engine (.Values.config.engine | default "transformer") -}}{{- $_ := set $config "engine" $engine -}}{{- end -}}
{{- $_ := set $config "conductor" (include "moonpool.conductors" . | fromJsonArray) -}}
{{- $_ := set $config "cluster_name" (printf "%s/%s" .Release.Namespace .Release.Name) -}}
{{- $_ := set $config "drain_grace" (int .Values.frontend.drainSeconds) -}}
{{- $_ := set $config "worker_drain_grace" (int .Values.workerDrainSeconds) -}}
{{- $_ := set $config "pool_bytes" .Values.pool.bytes -}}
{{- with include "moonpool.model" . -}}{{- $_ := set $config "model" . -}}{{- end -}}
{{- with .Values.model.servedNames -}}{{- $_ := set $config "served_model_name" . -}}{{- end -}}
{{- with include "moonpool.redisUrl" . -}}{{- $_ := set $config "redis_url" . -}}{{- end -}}
{{- if .Values.pool.ssd.hostPath -}}
{{- $_ := set $config "pool_ssd_dir" "/var/lib/moonpool/ssd" -}}
{{- with .Values.pool.ssd.bytes -}}{{- $_ := set $config "pool_ssd_bytes" . -}}{{- end -}}
{{- end -}}
{{- if .Values.pool.hugepages.amount -}}{{- $_ := set $config "pool_hugepages" "on" -}}{{- end -}}
{{- with .Values.rdma.devices -}}{{- $_ := set $config "rdma_devices" . -}}{{- end -}}
{{- if .Values.slo.record -}}
{{- $_ := set $config "slo_file" "/etc/moonpool/slo/slo.yaml" -}}
{{- $_ := set $config "slo_force" .Values.slo.force -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $config "tls_cert" "/etc/moonpool/tls/tls.crt" -}}
{{- $_ := set $config "tls_key" "/etc/moonpool/tls/tls.key" -}}
{{- $_ := set $config "tls_ca" "/etc/moonpool/tls/ca.crt" -}}
{{- end -}}
{{- if .Values.joinToken.existingSecret -}}{{- $_ := set $config "join_token_file" "/etc/moonpool/join/tokens" -}}{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* Checks that the schema cannot express. */ -}}
{{- define "moonpool.check" -}}
{{- if and .Values.externalRedis.url .Values.redis.enabled -}}
{{- fail "externalRedis.url and redis.enabled conflict: set redis.enabled to false" -}}
{{- end -}}
{{- if and .Values.externalRedis.existingSecret (not .Values.externalRedis.url) -}}
{{- fail "externalRedis.existingSecret needs externalRedis.url: set it to the address of that Redis" -}}
{{- end -}}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) (not .Values.tls.certManager.enabled) -}}
{{- fail "tls.enabled needs certificates: set tls.existingSecret, or tls.certManager.enabled and its issuerRef" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.issuerRef.name must not be empty: set it to the Issuer of the cluster's CA" -}}
{{- end -}}
{{- if include "moonpool.hostNetwork" . -}}
{{- if not (or .Values.tls.enabled .Values.rdma.allowUnauthenticatedHostNetwork) -}}
{{- fail "rdma.hostNetwork needs tls.enabled: no NetworkPolicy applies to pods in the host's network, so that anyone who can reach the hosts could call workers and pool nodes; set tls.enabled, or accept that by rdma.allowUnauthenticatedHostNetwork" -}}
{{- end -}}
{{- if and (eq .Values.mode "kuberay") (not (or .Values.ray.existingTokenSecret .Values.rdma.allowUnauthenticatedHostNetwork)) -}}
{{- fail "rdma.hostNetwork with mode kuberay needs ray.existingTokenSecret: anyone who can reach the hosts could run code through Ray's ports; set it, or accept that by rdma.allowUnauthenticatedHostNetwork" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.nodeCIDRs) -}}
{{- fail "rdma.hostNetwork needs networkPolicy.nodeCIDRs, the networks of the Kubernetes nodes: the policies would shut out the pods in the host's network; set it, or set networkPolicy.enabled to false" -}}
{{- end -}}
{{- end -}}
{{- if and (hasKey .Values.config "colocated_prefill") (hasKey .Values.config "undivided") -}}
{{- fail "config.undivided and config.colocated_prefill are two names of one setting: omit config.undivided" -}}
{{- end -}}
{{- $needed := dict "pvc" "existingClaim" "hostPath" "hostPath" "imageVolume" "reference" "huggingface" "id" -}}
{{- with get $needed .Values.model.source -}}
{{- if not (get $.Values.model .) -}}
{{- fail (printf "model.source %s needs model.%s, which is empty" $.Values.model.source .) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.model.cache.existingClaim .Values.model.cache.hostPath -}}
{{- fail "model.cache.existingClaim and model.cache.hostPath conflict: set one of them" -}}
{{- end -}}
{{- $roles := dict -}}
{{- range $name, $group := .Values.workers -}}
{{- if has $name (list "conductor" "frontend" "pool" "redis" "worker" "launcher" "ray" "ray-head" "config") -}}
{{- fail (printf "workers.%s: this name is reserved for another role; choose another one" $name) -}}
{{- end -}}
{{- if $group -}}{{- $_ := set $roles $group.role true -}}{{- end -}}
{{- end -}}
{{- if not (or $roles.aggregated (and $roles.prefill $roles.decode)) -}}
{{- fail "workers must have a group with role prefill and one with role decode, or one with role aggregated" -}}
{{- end -}}
{{- include "moonpool.checkEngines" . -}}
{{- end -}}
