/* Which variant runs: by the kind of number, and the level of instructions asked for. */
#pragma once
#include "job.h"

enum Kind : int { FLOAT, DOUBLE, HALF };

/* Null where this processor has none of this kind. */
const Variant *variant(int kind, int level);
