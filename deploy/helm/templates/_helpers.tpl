{{- define "kvserve.labels" -}}
app.kubernetes.io/name: kvserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "kvserve.hosts" -}}
["{{ .Release.Name }}-kvserve", "{{ .Release.Name }}-kvserve.{{ .Release.Namespace }}", "{{ .Release.Name }}-kvserve.{{ .Release.Namespace }}.svc", "{{ .Release.Name }}-kvserve.{{ .Release.Namespace }}.svc.cluster.local"
{{- if .Values.ingress.enabled }}, {{ .Values.ingress.host | quote }}{{ end }}
{{- if .Values.allowedHosts }}, {{ .Values.allowedHosts | join ", " }}{{ end }}]
{{- end -}}
