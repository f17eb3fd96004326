{{- define "rankscope.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rankscope.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rankscope.labels" -}}
{{ include "rankscope.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "rankscope.secret" -}}
{{- .Values.token.existingSecret | default (printf "%s-token" (include "rankscope.name" .)) -}}
{{- end -}}

{{- define "rankscope.database" -}}
{{- .Values.database.url | default "sqlite:////var/lib/rankscope/rankscope.db" -}}
{{- end -}}

{{- define "rankscope.publicUrl" -}}
{{- if .Values.publicUrl -}}
{{- .Values.publicUrl -}}
{{- else if .Values.ingress.enabled -}}
{{- printf "%s://%s" (ternary "https" "http" (ne .Values.ingress.tlsSecret "")) .Values.ingress.host -}}
{{- else -}}
{{- printf "http://%s.%s.svc:%d" (include "rankscope.name" .) .Release.Namespace (int .Values.service.port) -}}
{{- end -}}
{{- end -}}

{{/* What the server and the making of its token have in common. */}}
{{- define "rankscope.container" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: ["ALL"]
env:
  - name: HOME
    value: /tmp
  {{- if .Values.database.passwordSecret.name }}
  - name: PGPASSWORD
    valueFrom:
      secretKeyRef:
        name: {{ .Values.database.passwordSecret.name }}
        key: {{ .Values.database.passwordSecret.key }}
  {{- end }}
  {{- with .Values.environment }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "rankscope.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if not .Values.database.url }}
- name: data
  mountPath: /var/lib/rankscope
{{- end }}
{{- end -}}

{{- define "rankscope.pod" -}}
metadata:
  labels:
    {{- include "rankscope.labels" . | nindent 4 }}
spec:
  automountServiceAccountToken: false
  # A batch that is being stored comes to its end, and what was evaluated is kept.
  terminationGracePeriodSeconds: 60
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile:
      type: RuntimeDefault
  initContainers:
    # The server does not start before there is a token: others reach it.
    - name: token
      command:
        - rankscope
        - token
        - create
        - admin
        - --scope
        - admin
        - --secret-file
        - /run/secrets/rankscope/token
        - --db
        - {{ include "rankscope.database" . | quote }}
      {{- include "rankscope.container" . | nindent 6 }}
      volumeMounts:
        - name: token
          mountPath: /run/secrets/rankscope
          readOnly: true
        {{- include "rankscope.mounts" . | nindent 8 }}
  containers:
    - name: server
      args:
        - --db
        - {{ include "rankscope.database" . | quote }}
        - --public-url
        - {{ include "rankscope.publicUrl" . | quote }}
        {{- with .Values.otlp }}
        - --otlp
        - {{ . | quote }}
        {{- end }}
        {{- range .Values.arguments }}
        - {{ . | quote }}
        {{- end }}
      {{- include "rankscope.container" . | nindent 6 }}
      ports:
        - name: http
          containerPort: 8642
      # A new version migrates the database first, which may take a while.
      startupProbe:
        httpGet:
          path: /readyz
          port: http
        periodSeconds: 5
        failureThreshold: 120
      readinessProbe:
        httpGet:
          path: /readyz
          port: http
        periodSeconds: 10
        timeoutSeconds: 5
      # Says nothing of the database: a server is not ended because that is away.
      livenessProbe:
        httpGet:
          path: /healthz
          port: http
        periodSeconds: 20
        timeoutSeconds: 10
        failureThreshold: 6
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        {{- include "rankscope.mounts" . | nindent 8 }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: token
      secret:
        secretName: {{ include "rankscope.secret" . }}
        defaultMode: 0440
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
