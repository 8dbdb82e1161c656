#pragma once
#include <kv/cuda.h>
