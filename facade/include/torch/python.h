#pragma once
#include <kv/bind.h>
