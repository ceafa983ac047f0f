"""Forecasting: autoregressive models, latent autoregressive models, and what they must beat.

Every model has one interface: `fit(values)`, then `predict(history, steps)`.

>>> import numpy as np
>>> from elman.forecasting import Linear
>>> x = np.sin(0.1 * np.arange(200))[:, None]
>>> Linear(tau=2).fit(x).predict(x[:150], steps=3).round(3)[:, 0].tolist()
[0.65, 0.571, 0.486]
>>> x[150:153, 0].round(3).tolist()
[0.65, 0.571, 0.486]
"""

from elman.forecasting.autoregressive_errors import AutoregressiveErrors
from elman.forecasting.base import Forecaster, Inputs, features
from elman.forecasting.baselines import Drift, Last, Mean, Seasonal
from elman.forecasting.deseasonalised import Deseasonalised
from elman.forecasting.differenced import Differenced, Logged
from elman.forecasting.direction import Directions, both_directions
from elman.forecasting.estimator import SeriesForecaster
from elman.forecasting.experiment import Experiment, fit_and_measure
from elman.forecasting.global_network import Global
from elman.forecasting.intervals import Intervals, calibrate
from elman.forecasting.linear import Linear
from elman.forecasting.networks import Recurrent, Window
from elman.forecasting.regression import Regression
from elman.forecasting.settings import Settings
from elman.forecasting.smoothing import Smoothing
from elman.forecasting.stationarity import Stationarity, stationarity

__all__ = [
    "AutoregressiveErrors",
    "Deseasonalised",
    "Differenced",
    "Directions",
    "Drift",
    "Experiment",
    "Forecaster",
    "Global",
    "Inputs",
    "Intervals",
    "Last",
    "Linear",
    "Logged",
    "Mean",
    "Recurrent",
    "Regression",
    "Seasonal",
    "SeriesForecaster",
    "Settings",
    "Smoothing",
    "Stationarity",
    "Window",
    "both_directions",
    "calibrate",
    "features",
    "fit_and_measure",
    "stationarity",
]
