"""Dense experts as one mixture of experts.

architectures   those that can be written: names and config
gates           the routers' weights
view            a dense checkpoint under the names of the mixture
"""

from covmerge.plan.moe.architectures import ARCHITECTURES, Architecture
from covmerge.plan.moe.gates import gates_of
from covmerge.plan.moe.view import MixtureView, mixed

__all__ = ["ARCHITECTURES", "Architecture", "MixtureView", "gates_of", "mixed"]
