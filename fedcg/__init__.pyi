from experiments.audit_face import Audit as Audit
from experiments.audit_face import audit as audit
from experiments.face import Run as Run
from experiments.face import simulate as simulate
from fedcg.learning.client import Client as Client
from fedcg.learning.data.frames import signals as signals
from fedcg.learning.data.frames import table as table
from fedcg.learning.networks.cut import Halves
from fedcg.learning.networks.cut import split as split
from fedcg.learning.networks.task import Trainer as Trainer
from fedcg.learning.networks.task import TrainerContext as TrainerContext

Split = Halves
