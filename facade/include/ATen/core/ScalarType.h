#pragma once
#include <kv/core.h>
