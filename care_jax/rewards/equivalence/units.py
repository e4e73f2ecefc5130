"""The names of units of measurement, with prefixes and in words, and their sizes."""

from __future__ import annotations

_NAMES = {
    "degrees": "degrees degree deg 度", "rad": "rad radian radians",
    "cm": "厘米", "dm": "分米", "m": "米", "mm": "毫米", "km": "公里 千米", "kg": "公斤 千克",
    "g": "克", "Mg": "吨", "N": "牛 牛顿", "V": "伏 伏特", "W": "瓦 瓦特", "Ω": "欧 欧姆",
    "A": "安 安培", "J": "焦 焦耳", "Pa": "帕 帕斯卡", "Hz": "赫兹", "mol": "摩尔", "Wh": "瓦时",
    "ha": "ha hectare hectares 公顷",
    "mg": "毫克", "l": "L 升", "dl": "dL", "ml": "mL 毫升", "μl": "μL", "μm": "um", "μF": "uF",
    "s": "sec secs 秒",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "lb": "lb lbs pound pounds", "oz": "oz ounce ounces", "gal": "gal gallon gallons",
    "min": "min mins minute minutes 分钟", "h": "h hr hrs hour hours 小时 时",
    "day": "day days 天", "week": "week weeks 周", "month": "month months",
    "year": "year years yr yrs",
    "": "unit units old long wide high tall deep",
    "square": "square sq", "cubic": "cubic cu", "per": "per",
    "mi per h": "mph", "km per h": "kph kmph", "mi per gal": "mpg",
    "rev": "rev revolution revolutions", "rev per min": "rpm", "N m": "Nm", "kN m": "kNm",
    "dB": "dB decibel decibels",
    "$": "$ US$ USD dollar dollars", "cents": "¢ cent cents", "€": "€ EUR euro euros",
    "£": "£ GBP", "¥": "¥ CNY RMB 元", "Rs": "₹ Rs Rs. INR rupee rupees",
    "C": "celsius 摄氏度", "F": "fahrenheit", "K": "K kelvin kelvins",
    "KB": "KB", "MB": "MB", "GB": "GB", "TB": "TB", "'": "'", '"': '" \'\'',
}  # fmt: skip
_PREFIXES = {"p": ("pico", 1), "n": ("nano", 10**3), "μ": ("micro", 10**6), "m": ("milli", 10**9),
             "c": ("centi", 10**10), "d": ("deci", 10**11), "": ("", 10**12),
             "k": ("kilo", 10**15), "M": ("mega", 10**18), "G": ("giga", 10**21)}  # fmt: skip
# Prefixes and words of each unit. Those that are omitted mean something else: pm is a half of the
# day, and kT an energy.
_PREFIXED = {
    "m": ("nμmcdk", "meter metre"), "g": ("nμmkM", "gram"), "l": ("μmcd", "L liter litre"),
    "s": ("nμm", "second"), "N": ("mkMG", "newton"), "J": ("mkMG", "joule"),
    "W": ("μmkMG", "watt"), "V": ("μmkMG", "volt"), "A": ("nμmkMG", "amp ampere"),
    "Ω": ("mkMG", "ohm"), "Hz": ("mkMG", "hertz"), "Pa": ("mkMG", "pascal"),
    "eV": ("mkMG", "electronvolt"), "Wh": ("mkMG", ""), "VA": ("kM", ""),
    "F": ("pnμm", "farad"), "H": ("pnμm", "henry"), "C": ("nμm", "coulomb"), "T": ("μm", "tesla"),
    "Wb": ("μm", "weber"), "mol": ("nμmk", "mole"), "cal": ("k", "calorie"),
}  # fmt: skip
_LONGER_THAN_SECONDS = {name: size * 10**12 for name, size in (
    ("min", 60), ("h", 3600), ("day", 86400), ("week", 604800))}  # fmt: skip


def _with_prefixes() -> dict[str, str]:
    """The units of `kW`, `kilowatt` and `kilowatts`."""
    names = {}
    for unit, (prefixes, words) in _PREFIXED.items():
        for prefix in ("", *prefixes):
            long = [_PREFIXES[prefix][0] + word for word in words.split()]
            for name in (prefix + unit, *long, *(f"{word}s" for word in long)):
                names[name] = prefix + unit
    return names


UNIT_NAMES = _with_prefixes() | {
    name: unit for unit, names in _NAMES.items() for name in names.split()
}
UNITS = frozenset(UNIT_NAMES.values())
# Units that may be squared and cubed, and "" for `units`.
LENGTHS = frozenset({"", "m", "in", "ft", "yd", "mi", *(f"{p}m" for p in _PREFIXED["m"][0])})
CURRENCIES = ("$", "€", "£", "¥", "Rs")
# The size of each unit, in the smallest unit of its group.
SIZES_OF_UNITS = (
    *(
        {prefix + unit: _PREFIXES[prefix][1] for prefix in ("", *prefixes)}
        | (_LONGER_THAN_SECONDS if unit == "s" else {})
        for unit, (prefixes, _) in _PREFIXED.items()
    ),
    {"in": 1, "ft": 12, "yd": 36, "mi": 63360},
    {"oz": 1, "lb": 16},
    {"ml": 1, "cubic cm": 1, "l": 10**3, "cubic dm": 10**3, "cubic m": 10**6},
    {"month": 1, "year": 12},
    {"square m": 1, "ha": 10**4, "square km": 10**6},
    {"cents": 1, "$": 100},
    {"cents": 1, "€": 100},
    # A name or sign that stands for several units.
    {"£": 1, "lb": 1}, {"¥": 1, "yen": 1}, {"¥": 1, "yuan": 1},
    {"degrees": 1, "C": 1}, {"degrees": 1, "F": 1},
    {"'": 1, "ft": 1}, {"'": 1, "min": 1}, {'"': 1, "in": 1}, {'"': 1, "s": 1},
)  # fmt: skip
