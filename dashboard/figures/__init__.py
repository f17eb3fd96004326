"""Figures as pure functions: arrays in, a plotly figure out. No HTTP, no server, no files.

The web page, the self-contained report and a notebook show the same ones.
"""

from rankscope.dashboard.figures.arrays import Curve, Mark, rank_list
from rankscope.dashboard.figures.axes import Axis, axis_of, on_axis
from rankscope.dashboard.figures.curves import MAX_LINES, rank_curves
from rankscope.dashboard.figures.data import data_by_rank, data_over_steps, overlap_matrix
from rankscope.dashboard.figures.divergence_heatmap import divergence_heatmap
from rankscope.dashboard.figures.layers import layer_heatmap, reduced
from rankscope.dashboard.figures.matrix import distance_matrix
from rankscope.dashboard.figures.metric_heatmap import metric_heatmap
from rankscope.dashboard.figures.noise import gradient_noise
from rankscope.dashboard.figures.scaling import Scaled, scaling_efficiency
from rankscope.dashboard.figures.smoothing import smooth
from rankscope.dashboard.figures.theme import DARK, LIGHT, THEMES, Theme, rank_colors
from rankscope.dashboard.figures.times import time_by_rank, time_shares
from rankscope.dashboard.figures.two_runs import run_curves
from rankscope.dashboard.figures.units import axis_title

__all__ = [
    "DARK",
    "LIGHT",
    "MAX_LINES",
    "THEMES",
    "Axis",
    "Curve",
    "Mark",
    "Scaled",
    "Theme",
    "axis_of",
    "axis_title",
    "data_by_rank",
    "data_over_steps",
    "distance_matrix",
    "divergence_heatmap",
    "gradient_noise",
    "layer_heatmap",
    "on_axis",
    "overlap_matrix",
    "rank_colors",
    "rank_curves",
    "metric_heatmap",
    "rank_list",
    "reduced",
    "run_curves",
    "scaling_efficiency",
    "smooth",
    "time_by_rank",
    "time_shares",
]
