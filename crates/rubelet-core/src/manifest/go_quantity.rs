//! A quantity in upstream's in-memory form, which its dump of a pod shows.
//!
//! Owns: which of the two forms a text is parsed into, when the text itself is kept, rounding, sums. Never: what a
//! quantity means for a pod (`quantity.rs`).
//! Upstream: `apimachinery/pkg/api/resource`: ParseQuantity, RoundUp, Add, Cmp.

use std::{cmp::Ordering, fmt};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

/// Decimal places that an amount keeps at most.
const NANO: i32 = -9;
const MAX_DIGITS: usize = 18;
const BINARY: &str = "BinarySI";
const DECIMAL: &str = "DecimalSI";
const EXPONENT: &str = "DecimalExponent";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GoQuantity {
    amount: Amount,
    /// The text that was parsed, when it is the shortest; a sum has none.
    text: String,
    format: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Amount {
    /// `value * 10^scale`.
    Small { value: i64, scale: i32 },
    /// What does not fit, as `unscaled * 10^-scale`.
    Large {
        #[serde(with = "as_text")]
        unscaled: i128,
        scale: i32,
    },
}

/// JSON's numbers are too small for it.
mod as_text {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(number: &i128, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i128, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Default for GoQuantity {
    fn default() -> Self {
        GoQuantity { amount: Amount::Small { value: 0, scale: 0 }, text: String::new(), format: String::new() }
    }
}

impl GoQuantity {
    /// `None` for an invalid quantity, and for one with more than 38 digits.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text == "0" {
            return Some(GoQuantity { text: text.to_owned(), format: DECIMAL.to_owned(), ..GoQuantity::default() });
        }
        let parts = Parts::of(text)?;
        let (amount, is_shortest) = match parts.small() {
            Some(small) => small,
            None => return parts.large(),
        };
        let text = if is_shortest { text.to_owned() } else { String::new() };
        Some(GoQuantity { amount, text, format: parts.format.to_owned() })
    }

    /// Away from zero, to a multiple of `10^scale`.
    pub(super) fn round_up(mut self, scale: i32) -> Option<Self> {
        match self.amount {
            Amount::Small { scale: finer, .. } if finer >= scale => return Some(self),
            Amount::Small { value, scale: finer } => {
                let places = u32::try_from(scale - finer).ok()?;
                let rounded = divide_up(i128::from(value), places);
                self.amount = Amount::Small { value: i64::try_from(rounded).ok()?, scale };
            }
            Amount::Large { unscaled, scale: places } => {
                self.amount = Amount::Large { unscaled: rescale_up(unscaled, places, -scale)?, scale: -scale };
            }
        }
        self.text.clear();
        Some(self)
    }

    /// None when the sum has more than 38 digits.
    pub(super) fn add(&mut self, other: &GoQuantity) -> Option<()> {
        self.text.clear();
        let is_zero = matches!(self.amount, Amount::Small { value: 0, .. } | Amount::Large { unscaled: 0, .. });
        if is_zero {
            self.format.clone_from(&other.format);
        }
        self.amount = match (self.amount, other.amount) {
            (Amount::Small { .. }, Amount::Small { value: 0, .. }) => self.amount,
            (Amount::Small { value: 0, .. }, Amount::Small { .. }) => other.amount,
            (amount, added) => match small_sum(amount, added) {
                Some(sum) => sum,
                None => large_sum(amount, added)?,
            },
        };
        Some(())
    }

    /// Upstream converts both to the same form to compare them, and keeps the left one in it.
    pub(super) fn is_greater(&mut self, other: &GoQuantity) -> Option<bool> {
        let (left, places) = unscaled(self.amount);
        let (right, other_places) = unscaled(other.amount);
        let common = places.max(other_places);
        let order = rescale_up(left, places, common)?.cmp(&rescale_up(right, other_places, common)?);
        let both_small = matches!((self.amount, other.amount), (Amount::Small { .. }, Amount::Small { .. }));
        if !both_small {
            self.amount = Amount::Large { unscaled: left, scale: places };
        }
        Some(order == Ordering::Greater)
    }

    /// As it is written in a pod, in the shortest form.
    pub(super) fn to_text(&self) -> Text {
        let (unscaled, places) = unscaled(self.amount);
        let amount = Quantity::parse(&format!("{unscaled}e{}", -places)).unwrap_or_default();
        if self.format == BINARY { amount.binary_text() } else { amount.decimal_text() }
    }
}

impl fmt::Display for GoQuantity {
    /// The structure as spew writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, scale) = match self.amount {
            Amount::Small { value, scale } => (value, scale),
            Amount::Large { .. } => (0, 0),
        };
        write!(f, "{{i:(resource.int64Amount){{value:(int64){value} scale:(resource.Scale){scale}}} ")?;
        match self.amount {
            Amount::Small { .. } => f.write_str("d:(resource.infDecAmount){Dec:(*inf.Dec)<nil>} ")?,
            Amount::Large { unscaled, scale } => {
                write!(
                    f,
                    "d:(resource.infDecAmount){{Dec:(*inf.Dec){{unscaled:(big.Int){{neg:(bool){} ",
                    unscaled < 0
                )?;
                write!(f, "abs:(big.nat){}}} scale:(inf.Scale){scale}}}}} ", words(unscaled.unsigned_abs()))?;
            }
        }
        write!(f, "s:(string){} Format:(resource.Format){}}}", self.text, self.format)
    }
}

/// A quantity's text in its parts.
struct Parts<'a> {
    is_negative: bool,
    /// Without leading zeros, `0` if nothing is left.
    whole: &'a str,
    fraction: &'a str,
    exponent: i32,
    format: &'static str,
}

impl<'a> Parts<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
        let end = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let significant = unsigned.trim_start_matches('0');
        let (whole, rest) = significant.split_at(end(significant));
        let (fraction, suffix) = match rest.strip_prefix('.') {
            Some(rest) => rest.split_at(end(rest)),
            None => ("", rest),
        };
        let (exponent, format) = suffix_of(suffix)?;
        let whole = if whole.is_empty() { "0" } else { whole };
        (!text.is_empty()).then_some(Parts { is_negative: text.starts_with('-'), whole, fraction, exponent, format })
    }

    #[expect(clippy::arithmetic_side_effects, reason = "the number has no sign yet, so its negation is in range")]
    fn signed<T: std::ops::Neg<Output = T>>(&self, number: T) -> T {
        if self.is_negative { -number } else { number }
    }

    /// The small form and whether the text is the shortest, if upstream takes the number for small.
    fn small(&self) -> Option<(Amount, bool)> {
        let digits = format!("{}{}", self.whole, self.fraction);
        if self.format == BINARY {
            // 2^20 has some six decimal digits.
            let factor_digits = usize::try_from(self.exponent * 3 / 10).ok()?;
            if !self.fraction.is_empty() || self.whole.len() + factor_digits + 1 > 15 {
                return None;
            }
            let value: i64 = digits.parse().ok()?;
            let amount = Amount::Small { value: self.signed(value.checked_mul(1 << self.exponent)?), scale: 0 };
            return Some((amount, value & 7 != 0));
        }
        let scale = self.exponent - i32::try_from(self.fraction.len()).ok()?;
        if digits.len() > MAX_DIGITS || scale < NANO {
            return None;
        }
        let is_shortest = scale % 3 == 0 && !digits.ends_with("000") && !digits.starts_with('0');
        Some((Amount::Small { value: self.signed(digits.parse().ok()?), scale }, is_shortest))
    }

    fn large(&self) -> Option<GoQuantity> {
        let mut unscaled: i128 = format!("{}{}", self.whole, self.fraction).parse().ok()?;
        let mut scale = i32::try_from(self.fraction.len()).ok()?;
        let mut format = self.format;
        if format == BINARY {
            unscaled = unscaled.checked_mul(1 << self.exponent)?;
        } else {
            scale -= self.exponent;
        }
        if unscaled != 0 {
            unscaled = rescale_up(unscaled, scale, -NANO)?;
            scale = -NANO;
        }
        let one = 10_i128.pow(NANO.unsigned_abs());
        if format == BINARY && unscaled > i128::from(i64::MAX) * one {
            (unscaled, scale) = (i128::from(i64::MAX), 0);
        } else if format == BINARY && (1..one).contains(&unscaled) {
            format = DECIMAL;
        }
        let amount = Amount::Large { unscaled: self.signed(unscaled), scale };
        Some(GoQuantity { amount, text: String::new(), format: format.to_owned() })
    }
}

fn suffix_of(suffix: &str) -> Option<(i32, &'static str)> {
    Some(match suffix {
        "Ki" => (10, BINARY),
        "Mi" => (20, BINARY),
        "Gi" => (30, BINARY),
        "Ti" => (40, BINARY),
        "Pi" => (50, BINARY),
        "Ei" => (60, BINARY),
        "n" => (-9, DECIMAL),
        "u" => (-6, DECIMAL),
        "m" => (-3, DECIMAL),
        "" => (0, DECIMAL),
        "k" => (3, DECIMAL),
        "M" => (6, DECIMAL),
        "G" => (9, DECIMAL),
        "T" => (12, DECIMAL),
        "P" => (15, DECIMAL),
        "E" => (18, DECIMAL),
        other => (other.strip_prefix(['e', 'E'])?.parse().ok()?, EXPONENT),
    })
}

fn unscaled(amount: Amount) -> (i128, i32) {
    match amount {
        Amount::Small { value, scale } => (i128::from(value), -scale),
        Amount::Large { unscaled, scale } => (unscaled, scale),
    }
}

/// None if one of them is large, or the sum would be.
fn small_sum(left: Amount, right: Amount) -> Option<Amount> {
    let (Amount::Small { value, scale }, Amount::Small { value: added, scale: other }) = (left, right) else {
        return None;
    };
    let finest = scale.min(other);
    let value = value.checked_mul(power_of_ten(scale - finest)?)?;
    let sum = value.checked_add(added.checked_mul(power_of_ten(other - finest)?)?)?;
    Some(Amount::Small { value: sum, scale: finest })
}

fn large_sum(left: Amount, right: Amount) -> Option<Amount> {
    let ((left, left_scale), (right, right_scale)) = (unscaled(left), unscaled(right));
    let scale = left_scale.max(right_scale);
    let sum = rescale_up(left, left_scale, scale)?.checked_add(rescale_up(right, right_scale, scale)?)?;
    Some(Amount::Large { unscaled: sum, scale })
}

/// From `places` decimal places to `wanted`, rounding away from zero.
fn rescale_up(unscaled: i128, places: i32, wanted: i32) -> Option<i128> {
    match u32::try_from(wanted - places) {
        Ok(more) => match unscaled {
            0 => Some(0),
            unscaled => unscaled.checked_mul(10_i128.checked_pow(more)?),
        },
        Err(_) => Some(divide_up(unscaled, places.abs_diff(wanted))),
    }
}

fn divide_up(number: i128, places: u32) -> i128 {
    match 10_i128.checked_pow(places) {
        Some(divisor) if number % divisor == 0 => number / divisor,
        Some(divisor) => number / divisor + number.signum(),
        None => number.signum(),
    }
}

fn power_of_ten(places: i32) -> Option<i64> {
    10_i64.checked_pow(u32::try_from(places).ok()?)
}

/// The words of a big number, lowest first.
fn words(number: u128) -> String {
    let (low, high) = (number & u128::from(u64::MAX), number >> 64);
    match (low, high) {
        (0, 0) => "<nil>".to_owned(),
        (low, 0) => format!("[{low}]"),
        (low, high) => format!("[{low} {high}]"),
    }
}
