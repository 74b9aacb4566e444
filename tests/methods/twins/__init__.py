"""The papers' equations typed literally, in float64, without any thought of speed.

Every fast kernel is compared with its twin here. Names follow the papers. Each module has

    TWINS      method -> twin(group, **parameters), the merged update in float64
    VARIANTS   (method, parameters) that the comparisons run over
    LOW_RANK   method -> parameters that make updates of low rank well posed, where it needs any
"""

from tests.methods.twins import closed_form, data, elementwise, spaces, spectral

_MODULES = (closed_form, data, elementwise, spectral, spaces)

TWINS = {name: twin for module in _MODULES for name, twin in module.TWINS.items()}
VARIANTS = [variant for module in _MODULES for variant in module.VARIANTS]
LOW_RANK = {name: given for module in _MODULES for name, given in module.LOW_RANK.items()}
