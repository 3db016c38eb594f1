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

{{- /* (config, settings): adds settings to config. only: of them those keys; without: all but those. */ -}}
{{- define "moonpool.addSettings" -}}
{{- range $key, $value := .settings -}}
{{- /* Helm reads integers as floats, and would write large ones as 2e+06. */ -}}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) -}}{{- $value = int64 $value -}}{{- end -}}
{{- if and (has $key ($.only | default (list $key))) (not (has $key ($.without | default list))) -}}
{{- $_ := set $.config $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* (root, group): moonpool.yaml, one file for all roles; each ignores the keys of others. With `group`, the file of its
workers, which have settings of their own; withoutModels: what pool nodes read of it. */ -}}
{{- define "moonpool.config" -}}
{{- $values := .root.Values -}}
{{- $config := dict "log_format" "json" -}}
{{- include "moonpool.addSettings" (dict "config" $config "settings" $values.config) -}}
{{- $shared := include "moonpool.sharedKeys" . | fromJsonArray -}}
{{- if .group -}}
{{- include "moonpool.addSettings" (dict "config" $config "settings" .group.model.config "without" $shared) -}}
{{- include "moonpool.addSettings" (dict "config" $config "settings" .group.values.config) -}}
{{- end -}}
{{- if or .group (not $values.models) -}}
{{- $engine := (.group | default (include "moonpool.groups" .root | fromJsonArray | first)).engine -}}
{{- if ne $engine ($config.engine | default "transformer") -}}{{- $_ := set $config "engine" $engine -}}{{- end -}}
{{- $model := (.group | default dict).model | default (include "moonpool.models" .root | fromJsonArray | first) -}}
{{- with include "moonpool.modelPath" $model.source -}}{{- $_ := set $config "model" . -}}{{- end -}}
{{- if or $model.name $values.model.servedNames -}}{{- $_ := set $config "served_model_name" $model.names -}}{{- end -}}
{{- else if not .withoutModels -}}
{{- $models := list -}}
{{- range include "moonpool.models" .root | fromJsonArray -}}
{{- $entry := dict "name" (first .names) "path" (include "moonpool.modelPath" .source) "aliases" (rest .names) -}}
{{- include "moonpool.addSettings" (dict "config" $entry "settings" .config "only" $shared) -}}
{{- $models = append $models $entry -}}
{{- end -}}
{{- $_ := set $config "models" $models -}}
{{- end -}}
{{- $_ := set $config "conductor" (include "moonpool.conductors" .root | fromJsonArray) -}}
{{- $_ := set $config "cluster_name" (printf "%s/%s" .root.Release.Namespace .root.Release.Name) -}}
{{- $_ := set $config "drain_grace" (int $values.frontend.drainSeconds) -}}
{{- $_ := set $config "worker_drain_grace" (int $values.workerDrainSeconds) -}}
{{- $_ := set $config "pool_bytes" $values.pool.bytes -}}
{{- with include "moonpool.redisUrl" .root -}}{{- $_ := set $config "redis_url" . -}}{{- end -}}
{{- if $values.pool.ssd.hostPath -}}
{{- $_ := set $config "pool_ssd_dir" "/var/lib/moonpool/ssd" -}}
{{- with $values.pool.ssd.bytes -}}{{- $_ := set $config "pool_ssd_bytes" . -}}{{- end -}}
{{- end -}}
{{- if $values.pool.hugepages.amount -}}{{- $_ := set $config "pool_hugepages" "on" -}}{{- end -}}
{{- with $values.rdma.devices -}}{{- $_ := set $config "rdma_devices" . -}}{{- end -}}
{{- if $values.slo.record -}}
{{- $_ := set $config "slo_file" "/etc/moonpool/slo/slo.yaml" -}}
{{- $_ := set $config "slo_force" $values.slo.force -}}
{{- end -}}
{{- if $values.tls.enabled -}}
{{- $_ := set $config "tls_cert" "/etc/moonpool/tls/tls.crt" -}}
{{- $_ := set $config "tls_key" "/etc/moonpool/tls/tls.key" -}}
{{- $_ := set $config "tls_ca" "/etc/moonpool/tls/ca.crt" -}}
{{- end -}}
{{- if $values.joinToken.existingSecret -}}{{- $_ := set $config "join_token_file" "/etc/moonpool/join/tokens" -}}{{- end -}}
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
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitors.enabled -}}
{{- fail "monitoring.serviceMonitor.enabled and monitoring.podMonitors.enabled conflict, since every process would be scraped twice: set one of them to false" -}}
{{- end -}}
{{- if and .Values.endpointPicker.enabled .Values.frontend.tls.existingSecret -}}
{{- fail "endpointPicker.enabled and frontend.tls.existingSecret conflict: the picker polls API servers by HTTP, and a gateway calls the endpoints of an InferencePool by HTTP; end HTTPS at the gateway and leave frontend.tls.existingSecret empty, or set endpointPicker.enabled to false" -}}
{{- end -}}
{{- if and .Values.model.cache.existingClaim .Values.model.cache.hostPath -}}
{{- fail "model.cache.existingClaim and model.cache.hostPath conflict: set one of them" -}}
{{- end -}}
{{- include "moonpool.checkModels" . -}}
{{- include "moonpool.checkEngines" . -}}
{{- include "moonpool.checkScaling" . -}}
{{- end -}}
