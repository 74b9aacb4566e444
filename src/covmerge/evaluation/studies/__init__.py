"""The papers' studies, put to the suites' experts: `covmerge study`."""

from covmerge.evaluation.studies.accuracy import Ablation, Ridge, Sensitivity
from covmerge.evaluation.studies.cost import CostOfMethods
from covmerge.evaluation.studies.covariance import CovarianceReplaced
from covmerge.evaluation.studies.entries import EntriesOfUpdates
from covmerge.evaluation.studies.heterogeneity import Heterogeneity
from covmerge.evaluation.studies.interference import Interference
from covmerge.evaluation.studies.retention import Retention
from covmerge.evaluation.studies.spectra import SpectraBeforeAndAfter
from covmerge.evaluation.studies.study import Findings, Study, save

__all__ = ["STUDIES", "Findings", "Study", "save"]

STUDIES: dict[str, type[Study]] = {
    study.name: study
    for study in (
        Ablation,
        Sensitivity,
        Ridge,
        CovarianceReplaced,
        Interference,
        Heterogeneity,
        SpectraBeforeAndAfter,
        EntriesOfUpdates,
        Retention,
        CostOfMethods,
    )
}
