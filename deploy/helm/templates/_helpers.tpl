{{- define "kvserve.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}{{ else }}{{ .Release.Name }}-kvserve{{ end -}}
{{- end -}}
{{- define "kvserve.labels" -}}
app.kubernetes.io/name: kvserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- /* Not empty where more than one replica may run. */ -}}
{{- define "kvserve.several" -}}
{{- if or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}several{{ end -}}
{{- end -}}
{{- /* Any value as text: Helm reads 5368709120 as a float and prints 5.36870912e+09. */ -}}
{{- define "kvserve.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ . | toJson }}{{ end -}}
{{- end -}}
{{- /* A map whose values are texts, as labels and annotations are. */ -}}
{{- define "kvserve.texts" -}}
{{- range $key, $value := . }}
{{ $key | quote }}: {{ include "kvserve.text" $value | quote }}
{{- end -}}
{{- end -}}
{{- define "kvserve.hosts" -}}
{{- $name := include "kvserve.fullname" . -}}
["{{ $name }}", "{{ $name }}.{{ .Release.Namespace }}", "{{ $name }}.{{ .Release.Namespace }}.svc", "{{ $name }}.{{ .Release.Namespace }}.svc.cluster.local"
{{- if .Values.ingress.enabled }}, {{ .Values.ingress.host | quote }}{{ end }}
{{- if .Values.allowedHosts }}, {{ .Values.allowedHosts | join ", " }}{{ end }}]
{{- end -}}
{{- define "kvserve.settings" -}}
host: 0.0.0.0
port: 8000
model: {{ include "kvserve.text" .Values.model | quote }}
policy: {{ include "kvserve.text" .Values.policy.name | quote }}
policy-args: {{ .Values.policy.args | toJson }}
kv-cache-dtype: {{ .Values.pool.dtype | quote }}
{{- if .Values.pool.memory }}
kv-cache-memory: {{ include "kvserve.text" .Values.pool.memory | quote }}
{{- end }}
{{- if .Values.apiKey.secret }}
api-key-file: /etc/kvserve-keys/api-keys
{{- else }}
allowed-hosts: {{ include "kvserve.hosts" . }}
{{- end }}
shutdown-timeout: {{ .Values.shutdown.timeout }}
{{- if .Values.gpus }}
device: cuda
tensor-parallel-size: {{ .Values.gpus }}
{{- else }}
device: cpu
{{- end }}
{{- $own := include "kvserve.own" . | fromJson }}
{{- range $key, $_ := .Values.settings }}
{{- $name := $key | replace "_" "-" }}
{{- if hasPrefix "policy." $name }}{{ $name = "policy-args" }}{{ end }}
{{- with get $own $name }}{{ fail (printf "settings.%s: the chart writes it; give %s" $key .) }}{{ end }}
{{- end }}
{{- if .Values.settings }}
{{ .Values.settings | toYaml }}
{{- end }}
{{- end -}}
{{- /* The settings that the chart writes, and which of its values they come from. */ -}}
{{- define "kvserve.own" -}}
{{- $own := dict "host" "nothing (0.0.0.0)" "port" "service.port" "model" "model" "policy" "policy.name" "policy-args" "policy.args"
  "kv-cache-dtype" "pool.dtype" "kv-cache-memory" "pool.memory" "shutdown-timeout" "shutdown.timeout" "device" "gpus" }}
{{- if .Values.gpus }}{{ $_ := set $own "tensor-parallel-size" "gpus" }}{{ end }}
{{- if .Values.apiKey.secret }}{{ $_ := set $own "api-key-file" "apiKey.secret" }}{{ else }}{{ $_ := set $own "allowed-hosts" "allowedHosts" }}{{ end }}
{{- $own | toJson }}
{{- end -}}
