"""The papers' studies, put to the suites' experts: `covmerge study`."""

from covmerge_lab.studies.accuracy import Ablation, Ridge, Sensitivity
from covmerge_lab.studies.cost import CostOfMethods
from covmerge_lab.studies.covariance import CovarianceReplaced
from covmerge_lab.studies.entries import EntriesOfUpdates
from covmerge_lab.studies.fda import Anchors
from covmerge_lab.studies.generated import OwnInputs
from covmerge_lab.studies.half import Half
from covmerge_lab.studies.heterogeneity import Heterogeneity
from covmerge_lab.studies.interference import Interference
from covmerge_lab.studies.regimes import Regimes
from covmerge_lab.studies.retention import Retention
from covmerge_lab.studies.spectra import SpectraBeforeAndAfter
from covmerge_lab.studies.steps import StepsAroundMethods
from covmerge_lab.studies.study import Findings, Study, save
from covmerge_lab.studies.tuned import Tuned

__all__ = ["STUDIES", "Findings", "Study", "save"]

STUDIES: dict[str, type[Study]] = {
    study.name: study
    for study in (
        Ablation,
        Sensitivity,
        Ridge,
        Tuned,
        Regimes,
        Half,
        CovarianceReplaced,
        OwnInputs,
        Anchors,
        StepsAroundMethods,
        Interference,
        Heterogeneity,
        SpectraBeforeAndAfter,
        EntriesOfUpdates,
        Retention,
        CostOfMethods,
    )
}
