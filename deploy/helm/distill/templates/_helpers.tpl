{{- define "distill.labels" -}}
app.kubernetes.io/name: distill
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "distill.selector" -}}
app.kubernetes.io/name: distill
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "distill.image" -}}
{{ .root.Values.images.repository }}/distill-{{ .name }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "distill.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "distill.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* The gRPC probes of the kubelet use no TLS, so the container asks itself. */}}
{{- define "distill.probe" -}}
exec:
  command: [python, -P, -m, protos.rpc.health, "https://localhost:{{ .port }}"]
periodSeconds: 20
timeoutSeconds: 10
{{- end }}

{{- define "distill.secretVariable" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}

{{/* Mounts and volumes that both pods have. */}}
{{- define "distill.mounts" -}}
- {name: data, mountPath: /data}
- {name: tls, mountPath: /etc/distill/tls, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: memory, mountPath: /dev/shm}
{{- if .modelsClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "distill.volumes" -}}
- name: tls
  secret:
    secretName: {{ .root.Values.access.tlsSecret }}
    defaultMode: 0440
- name: tmp
  emptyDir: {}
- name: memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .of.sharedMemory }}
{{- if .of.modelsClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .of.modelsClaim }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "distill.resources" -}}
{{- $resources := deepCopy .resources }}
{{- if .gpus }}
{{- $limits := get $resources "limits" | default dict }}
{{- $_ := set $limits "nvidia.com/gpu" .gpus }}
{{- $_ := set $resources "limits" $limits }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "distill.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}
