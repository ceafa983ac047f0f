"""Layers × directions × dropout over all of time, forwards and back, as one differentiable whole.

strand → stack → operator (eager) or compiled (`torch.compile`); sliding and piecewise are other
ways back through the same stack. `elman.nn` is what users touch.
"""
