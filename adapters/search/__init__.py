"""Tree search for Equinox modules: mctx's policies, faster and without their traps."""

from .policies import search as search
from .selection import SearchValues as SearchValues
from .selection import legal_actions as legal_actions
from .selection import qtransform_completed_by_mix_value as qtransform_completed_by_mix_value
from .selection import search_values as search_values
