"""Dense experts as one mixture of experts.

forms   the architectures that can be written: names and config
gates   the routers' weights
view    a dense checkpoint under the names of the mixture
"""

from covmerge.plan.moe.forms import FORMS, Form
from covmerge.plan.moe.gates import gates_of
from covmerge.plan.moe.view import MixtureView, config_of_mixture, mixed

__all__ = ["FORMS", "Form", "MixtureView", "config_of_mixture", "gates_of", "mixed"]
