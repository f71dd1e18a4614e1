{{- define "kvserve.labels" -}}
app.kubernetes.io/name: kvserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
