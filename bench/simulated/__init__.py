"""``holdfast bench --simulate``: forecasts of a job's saves and loads, without any data.

``fleet`` plans for every rank with the engine's own functions. ``forecast`` turns the plans into
requests and time.
"""
