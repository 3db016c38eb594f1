{{- /* Parts of pods of all roles. Each template takes a dict with root (the chart's scope), pod (values as frontend.pod),
moves (true for workers and pool nodes, which transfer KV), models (those that it needs, of "moonpool.models"), and group (of
"moonpool.groups", for workers that have a configuration file of their own). withoutModels: a change of `models` restarts no pod. */ -}}

{{- define "moonpool.podMetadata" -}}
labels:
  {{- /* Without versions, so that a new chart alone restarts no pod. */}}
  {{- include "moonpool.selector" . | nindent 2 }}
  {{- with .role }}
  llm-d.ai/role: {{ . }}
  {{- end }}
  {{- with .pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- /* Excludes the record of objectives, whose versions change in a running cluster. */}}
  checksum/config: {{ include "moonpool.config" (pick . "root" "group" "withoutModels") | sha256sum }}
  {{- with .pod.annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if and .moves .root.Values.rdma.enabled }}
  {{- with .root.Values.rdma.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{- define "moonpool.podSpec" -}}
{{- $rdma := and .moves .root.Values.rdma.enabled -}}
{{- $root := and $rdma .root.Values.rdma.runAsRoot -}}
serviceAccountName: {{ .serviceAccount | default (include "moonpool.serviceAccount" .root) }}
automountServiceAccountToken: false
{{- /* For a service named moonpool, Kubernetes would set MOONPOOL_... variables, which the roles reject. */}}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: {{ not $root }}
  runAsUser: {{ ternary 0 (int .root.Values.runAsUser) (not (not $root)) }}
  runAsGroup: {{ int .root.Values.runAsUser }}
  fsGroup: {{ int .root.Values.runAsUser }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- if and .moves (include "moonpool.hostNetwork" .root) }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .pod.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .pod.topologySpreadConstraints | nindent 2 }}
{{- else if .spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "moonpool.selector" . | nindent 8 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .pod.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- end -}}

{{- /* Image, privileges, variables and resources of a container. image: in place of that of all roles; env: additional
variables. */ -}}
{{- define "moonpool.container" -}}
{{- $rdma := and .moves .root.Values.rdma.enabled -}}
image: {{ include "moonpool.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if $rdma }}
    add: [IPC_LOCK]
    {{- end }}
env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  - name: MOONPOOL_CONFIG
    value: /etc/moonpool/moonpool.yaml
  {{- with .root.Values.monitoring.tracing }}
  {{- if .endpoint }}
  - name: OTEL_EXPORTER_OTLP_ENDPOINT
    value: {{ .endpoint | quote }}
  - name: OTEL_TRACES_SAMPLER
    value: parentbased_traceidratio
  - name: OTEL_TRACES_SAMPLER_ARG
    value: {{ .share | quote }}
  - name: OTEL_RESOURCE_ATTRIBUTES
    value: k8s.namespace.name={{ $.root.Release.Namespace }},k8s.pod.name=$(POD_NAME),k8s.node.name=$(NODE_NAME)
  {{- end }}
  {{- end }}
  {{- if include "moonpool.usesHub" . }}
  - {name: HF_HOME, value: /models/hub}
  - {name: HF_HUB_OFFLINE, value: "1"}
  {{- end }}
  {{- with .env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .pod.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .pod.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- include "moonpool.resources" . | nindent 2 }}
{{- end -}}

{{- /* Resources of the pod, with RDMA devices for those that transfer KV. pool: with huge pages; gpus: with as many GPUs. */ -}}
{{- define "moonpool.resources" -}}
{{- $resources := deepCopy (.pod.resources | default dict) -}}
{{- $further := dict -}}
{{- if and .moves .root.Values.rdma.enabled -}}{{- $further = deepCopy .root.Values.rdma.resources -}}{{- end -}}
{{- with .root.Values.pool.hugepages -}}
{{- if and $.pool .amount -}}{{- $_ := set $further (printf "hugepages-%s" .size) .amount -}}{{- end -}}
{{- end -}}
{{- with .gpus -}}{{- $_ := set $further "nvidia.com/gpu" . -}}{{- end -}}
{{- if $further -}}
{{- range list "limits" "requests" -}}
{{- $_ := set $resources . (merge (deepCopy $further) (get $resources . | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- /* HTTP or HTTPS probes: port, and seconds until the start-up probe must succeed, or its period and threshold. */ -}}
{{- define "moonpool.probes" -}}
{{- $scheme := ternary ", scheme: HTTPS" "" (not (empty .https)) -}}
startupProbe:
  httpGet: {path: {{ .started }}, port: {{ .port }}{{ $scheme }}}
  {{- with .startup }}
  periodSeconds: {{ int .periodSeconds }}
  failureThreshold: {{ int .failureThreshold }}
  {{- else }}
  periodSeconds: 5
  failureThreshold: {{ div (add .startSeconds 4) 5 }}
  {{- end }}
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "moonpool.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/moonpool/moonpool.yaml, subPath: {{ include "moonpool.configFile" .group }}, readOnly: true}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/moonpool/tls, readOnly: true}
{{- end }}
{{- if .root.Values.joinToken.existingSecret }}
- {name: join, mountPath: /etc/moonpool/join, readOnly: true}
{{- end }}
{{- range .models }}
{{- if has .source.source (list "pvc" "hostPath" "imageVolume") }}
- {name: model{{ include "moonpool.modelSuffix" . }}, mountPath: {{ .source.path }}, readOnly: true{{ with .source.subPath }}, subPath: {{ . }}{{ end }}}
{{- end }}
{{- end }}
{{- if include "moonpool.usesHub" . }}
- {name: {{ include "moonpool.hubVolume" .root }}, mountPath: /models/hub, readOnly: true}
{{- end }}
{{- if and .moves .root.Values.pool.sharedMemory.enabled (eq .root.Values.mode "statefulset") }}
- {name: sockets, mountPath: /run/moonpool}
{{- end }}
{{- if and .pool .root.Values.pool.ssd.hostPath }}
- {name: ssd, mountPath: /var/lib/moonpool/ssd}
{{- end }}
{{- if .shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with .pod.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "moonpool.volumes" -}}
- name: tmp
  emptyDir: {}
- name: config
  configMap: {name: {{ include "moonpool.fullname" .root }}-config}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "moonpool.tlsSecret" .root }}, defaultMode: 0440}
{{- end }}
{{- with .root.Values.joinToken.existingSecret }}
- name: join
  secret: {secretName: {{ . }}, items: [{key: tokens, path: tokens}], defaultMode: 0440}
{{- end }}
{{- range .models }}
{{- if has .source.source (list "pvc" "hostPath" "imageVolume") }}
- name: model{{ include "moonpool.modelSuffix" . }}
  {{- if eq .source.source "pvc" }}
  persistentVolumeClaim: {claimName: {{ .source.existingClaim }}, readOnly: true}
  {{- else if eq .source.source "hostPath" }}
  hostPath: {path: {{ .source.hostPath }}, type: Directory}
  {{- else }}
  image: {reference: {{ .source.reference | quote }}, pullPolicy: {{ $.root.Values.image.pullPolicy }}}
  {{- end }}
{{- end }}
{{- end }}
{{- if include "moonpool.usesHub" . }}
{{- with .root.Values.model }}
- name: {{ include "moonpool.hubVolume" $.root }}
  {{- if .cache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .cache.existingClaim }}}
  {{- else if .cache.hostPath }}
  hostPath: {path: {{ .cache.hostPath }}, type: Directory}
  {{- else }}
  emptyDir: {{ if .cache.sizeLimit }}{sizeLimit: {{ .cache.sizeLimit }}}{{ else }}{}{{ end }}
  {{- end }}
{{- end }}
{{- end }}
{{- if and .moves .root.Values.pool.sharedMemory.enabled (eq .root.Values.mode "statefulset") }}
- name: sockets
  hostPath: {path: {{ include "moonpool.socketPath" .root }}, type: DirectoryOrCreate}
{{- end }}
{{- if and .pool .root.Values.pool.ssd.hostPath }}
- name: ssd
  hostPath: {path: {{ .root.Values.pool.ssd.hostPath }}, type: Directory}
{{- end }}
{{- with .shmSize }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with .pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* A folder of the host for this release only. */ -}}
{{- define "moonpool.socketPath" -}}
{{ .Values.pool.sharedMemory.hostPath }}/{{ .Release.Namespace }}-{{ include "moonpool.fullname" . }}
{{- end -}}

{{- /* Init containers of a pod; empty without any. weights: true for pods that compute. */ -}}
{{- define "moonpool.initContainers" -}}
{{- $own := printf "%s%s" (include "moonpool.prepareSockets" .) (include "moonpool.downloadModels" .) -}}
{{- $further := "" -}}
{{- with .pod.initContainers -}}{{- $further = printf "\n%s" (toYaml .) -}}{{- end -}}
{{- $all := printf "%s%s" $own $further | trim -}}
{{- if $all -}}
initContainers:
  {{- $all | nindent 2 }}
{{- end -}}
{{- end -}}

{{- /* "true" if the pod needs a model of the Hugging Face hub, else empty. */ -}}
{{- define "moonpool.usesHub" -}}
{{- range .models -}}{{- if eq .source.source "huggingface" -}}true{{- end -}}{{- end -}}
{{- end -}}

{{- /* (root): the volume with all models of the hub. */ -}}
{{- define "moonpool.hubVolume" -}}
{{- ternary "hub" "model" (not (empty .Values.models)) -}}
{{- end -}}

{{- /* Downloads the models of the Hugging Face hub into the cache; the roles find them there and need no network. */ -}}
{{- define "moonpool.downloadModels" -}}
{{- range $model := .models }}
{{- if eq $model.source.source "huggingface" }}
{{- with $ }}
- name: model{{ include "moonpool.modelSuffix" $model }}
  image: {{ include "moonpool.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - download
    - {{ include "moonpool.modelPath" $model.source | quote }}
    {{- if not .weights }}
    - --no-weights
    {{- end }}
    {{- if eq (include "moonpool.engine" (dict "root" .root "model" $model)) "vllm" }}
    - --any-family
    {{- end }}
  env:
    - {name: HF_HOME, value: /models/hub}
    {{- with .root.Values.model.token }}
    {{- if .existingSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
    {{- end }}
    {{- end }}
    {{- with .pod.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 2Gi}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: {{ include "moonpool.hubVolume" .root }}, mountPath: /models/hub}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Kubernetes creates host folders for root; this changes the owner to the processes' user. */ -}}
{{- define "moonpool.prepareSockets" -}}
{{- if and .moves .root.Values.pool.sharedMemory.enabled .root.Values.pool.sharedMemory.prepare (eq .root.Values.mode "statefulset") }}
- name: sockets
  image: {{ include "moonpool.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [chown, {{ printf "%d:%d" (ternary 0 (int .root.Values.runAsUser) (and .root.Values.rdma.enabled .root.Values.rdma.runAsRoot)) (int .root.Values.runAsUser) | quote }}, /run/moonpool]
  securityContext:
    runAsUser: 0
    runAsNonRoot: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN]}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: sockets, mountPath: /run/moonpool}
{{- end }}
{{- end -}}

{{- /* (root, name, component, budget) */ -}}
{{- define "moonpool.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "moonpool.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "moonpool.selector" . | nindent 6 }}
{{- end -}}
