"""What a server answers: times are `datetime`; numbers `float`, NaN and infinities too.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from rankscope.client.models.alerts import Acknowledgement as Acknowledgement
from rankscope.client.models.alerts import Alert as Alert
from rankscope.client.models.alerts import AlertDetail as AlertDetail
from rankscope.client.models.alerts import Silence as Silence
from rankscope.client.models.alerts import Since as Since
from rankscope.client.models.alerts import Transition as Transition
from rankscope.client.models.comparison import AlertDifference as AlertDifference
from rankscope.client.models.comparison import BitComparison as BitComparison
from rankscope.client.models.comparison import CheckDifference as CheckDifference
from rankscope.client.models.comparison import Compared as Compared
from rankscope.client.models.comparison import ConfigurationDifference as ConfigurationDifference
from rankscope.client.models.comparison import FirstDifference as FirstDifference
from rankscope.client.models.comparison import KindAlerts as KindAlerts
from rankscope.client.models.comparison import MetricDifference as MetricDifference
from rankscope.client.models.comparison import RunVerdict as RunVerdict
from rankscope.client.models.comparison import SettingDifference as SettingDifference
from rankscope.client.models.detectors import DetectorAbout as DetectorAbout
from rankscope.client.models.detectors import Detectors as Detectors
from rankscope.client.models.detectors import DetectorSettings as DetectorSettings
from rankscope.client.models.detectors import DetectorThreshold as DetectorThreshold
from rankscope.client.models.detectors import ProfileAbout as ProfileAbout
from rankscope.client.models.detectors import ProjectDetectors as ProjectDetectors
from rankscope.client.models.fleet import Fleet as Fleet
from rankscope.client.models.fleet import Recurring as Recurring
from rankscope.client.models.notifications import Delivery as Delivery
from rankscope.client.models.notifications import Notification as Notification
from rankscope.client.models.notifications import NotificationTarget as NotificationTarget
from rankscope.client.models.notifications import TargetOutcome as TargetOutcome
from rankscope.client.models.runs import Accepted as Accepted
from rankscope.client.models.runs import Agent as Agent
from rankscope.client.models.runs import AgentEvent as AgentEvent
from rankscope.client.models.runs import AgentFault as AgentFault
from rankscope.client.models.runs import CheckLine as CheckLine
from rankscope.client.models.runs import Comparison as Comparison
from rankscope.client.models.runs import Matrix as Matrix
from rankscope.client.models.runs import Metric as Metric
from rankscope.client.models.runs import MetricFamily as MetricFamily
from rankscope.client.models.runs import OpenAlert as OpenAlert
from rankscope.client.models.runs import Project as Project
from rankscope.client.models.runs import RankSeries as RankSeries
from rankscope.client.models.runs import RankStatus as RankStatus
from rankscope.client.models.runs import Requirement as Requirement
from rankscope.client.models.runs import Run as Run
from rankscope.client.models.runs import RunDetail as RunDetail
from rankscope.client.models.runs import RunState as RunState
from rankscope.client.models.runs import Sampling as Sampling
from rankscope.client.models.runs import Series as Series
from rankscope.client.models.runs import Severity as Severity
from rankscope.client.models.runs import TensorDifference as TensorDifference
from rankscope.client.models.runs import Verdict as Verdict
from rankscope.client.models.runs import VerdictName as VerdictName
from rankscope.client.models.runs import VerdictSettings as VerdictSettings
