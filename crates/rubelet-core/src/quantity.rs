//! Kubernetes quantities: `1500m`, `128Mi`, `1e3`.
//!
//! Owns: parsing quantities exactly, and writing amounts in the API's canonical form. Never: rewrites a manifest's text.
//! Upstream: `k8s.io/apimachinery/pkg/api/resource`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;

/// An amount in billionths, the finest step a quantity has. Finer amounts are rounded away from zero, as upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity {
    nanos: i128,
}

/// Upstream's texts, which the API server uses, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

const NANOS_PER_UNIT: i128 = 1_000_000_000;
/// Upstream caps quantities at the largest `i64`.
const MAX_NANOS: i128 = i64::MAX as i128 * NANOS_PER_UNIT;

impl Quantity {
    pub const ZERO: Quantity = Quantity { nanos: 0 };

    pub fn from_units(units: i64) -> Self {
        Quantity { nanos: i128::from(units) * NANOS_PER_UNIT }
    }

    pub fn from_millis(millis: i64) -> Self {
        Quantity { nanos: i128::from(millis) * (NANOS_PER_UNIT / 1000) }
    }

    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        let (is_negative, rest) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix('+').unwrap_or(text)),
        };
        let number_len = rest.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
        let (number, suffix) = rest.split_at(number_len);
        let (digits, whole) = digits_of(number)?;
        let nanos = scaled(&digits, whole, scale_of(suffix)?);
        Ok(Quantity { nanos: if is_negative { -nanos } else { nanos } })
    }

    /// Whole units, rounded up.
    pub fn value(self) -> i64 {
        self.in_steps_of(NANOS_PER_UNIT)
    }

    /// Thousandths, rounded up.
    pub fn millis(self) -> i64 {
        self.in_steps_of(NANOS_PER_UNIT / 1000)
    }

    pub fn is_zero(self) -> bool {
        self.nanos == 0
    }

    pub fn is_positive(self) -> bool {
        self.nanos > 0
    }

    pub fn saturating_add(self, other: Quantity) -> Quantity {
        Quantity { nanos: (self.nanos + other.nanos).clamp(-MAX_NANOS, MAX_NANOS) }
    }

    /// The difference, at least zero.
    pub fn less(self, other: Quantity) -> Quantity {
        Quantity { nanos: (self.nanos - other.nanos).max(0) }
    }

    /// As the API writes amounts counted in thousands: `2`, `1900m`, `110`, `1k`.
    pub fn decimal_text(self) -> Text {
        const SUFFIXES: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
        if self.nanos == 0 {
            return Text("0".to_owned());
        }
        let (number, suffix) = reduced(self.nanos, 1000, &SUFFIXES);
        Text(format!("{number}{suffix}"))
    }

    /// As the API writes amounts of memory, rounded up to whole bytes: `16369252Ki`, `0`.
    pub fn binary_text(self) -> Text {
        const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        let value = self.value();
        if value.unsigned_abs() < 1024 {
            return Quantity::from_units(value).decimal_text();
        }
        let (number, suffix) = reduced(i128::from(value), 1024, &SUFFIXES);
        Text(format!("{number}{suffix}"))
    }

    fn in_steps_of(self, step_nanos: i128) -> i64 {
        let away_from_zero = (self.nanos.abs() + step_nanos - 1) / step_nanos * self.nanos.signum();
        i64::try_from(away_from_zero).unwrap_or(if self.nanos < 0 { i64::MIN } else { i64::MAX })
    }
}

/// The amount of `name` in a resource list; zero when absent. Validation has rejected invalid ones.
pub fn amount(list: Option<&BTreeMap<String, Text>>, name: &str) -> Quantity {
    list.and_then(|list| list.get(name)).and_then(|text| Quantity::parse(&text.0).ok()).unwrap_or_default()
}

/// The number without its whole factors of `base`, and the suffix for them.
fn reduced<'a>(mut number: i128, base: i128, suffixes: &[&'a str]) -> (i128, &'a str) {
    let mut factors = 0;
    while factors + 1 < suffixes.len() && number % base == 0 {
        number /= base;
        factors += 1;
    }
    (number, suffixes[factors])
}

#[derive(Clone, Copy)]
enum Scale {
    Binary(u32),
    Decimal(i32),
}

/// All digits, and how many of them are before the point.
fn digits_of(number: &str) -> Result<(Vec<u8>, i64), QuantityError> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return Err(QuantityError::Format);
    }
    let digits = [whole.as_bytes(), fraction.as_bytes()].concat();
    Ok((digits, i64::try_from(whole.len()).map_err(|_| QuantityError::Format)?))
}

fn scale_of(suffix: &str) -> Result<Scale, QuantityError> {
    Ok(match suffix {
        "n" => Scale::Decimal(-9),
        "u" => Scale::Decimal(-6),
        "m" => Scale::Decimal(-3),
        "" => Scale::Decimal(0),
        "k" => Scale::Decimal(3),
        "M" => Scale::Decimal(6),
        "G" => Scale::Decimal(9),
        "T" => Scale::Decimal(12),
        "P" => Scale::Decimal(15),
        "E" => Scale::Decimal(18),
        "Ki" => Scale::Binary(10),
        "Mi" => Scale::Binary(20),
        "Gi" => Scale::Binary(30),
        "Ti" => Scale::Binary(40),
        "Pi" => Scale::Binary(50),
        "Ei" => Scale::Binary(60),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E']).and_then(|exponent| exponent.parse().ok());
            Scale::Decimal(exponent.ok_or_else(|| suffix_error(suffix))?)
        }
    })
}

/// Letters that could be of a suffix, then perhaps a sign and digits, are a suffix that does not exist.
fn suffix_error(suffix: &str) -> QuantityError {
    let rest = suffix.trim_start_matches(|letter| "eEinumkKMGTP".contains(letter));
    let digits = rest.strip_prefix(['-', '+']).unwrap_or(rest);
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { QuantityError::Suffix } else { QuantityError::Format }
}

/// In billionths, rounded up, at most `MAX_NANOS`. `whole` digits are before the point.
fn scaled(digits: &[u8], whole: i64, scale: Scale) -> i128 {
    /// Of a billionth; digits after them can only round up. A binary suffix times so many digits fits.
    const FRACTION_DIGITS: i64 = 20;
    /// All numbers of so many digits fit, and the largest quantity has fewer.
    const MAX_DIGITS: i64 = 38;
    let (decimal, binary) = match scale {
        Scale::Decimal(exponent) => (exponent, 0),
        Scale::Binary(exponent) => (0, exponent),
    };
    let zeros = digits.iter().take_while(|digit| **digit == b'0').count();
    let digits = &digits[zeros..];
    // How many of the digits make whole billionths.
    let nano_digits = whole - i64::try_from(zeros).unwrap_or(i64::MAX) + i64::from(decimal) + 9;
    if digits.is_empty() {
        return 0;
    }
    if nano_digits > MAX_DIGITS {
        return MAX_NANOS;
    }
    let number = |places: std::ops::Range<i64>| {
        let digit = |place: i64| usize::try_from(place).ok().and_then(|place| digits.get(place)).unwrap_or(&b'0');
        places.fold(0_i128, |number, place| number * 10 + i128::from(digit(place) - b'0'))
    };
    let nanos = number(0..nano_digits);
    let fraction = number(nano_digits..nano_digits + FRACTION_DIGITS) << binary;
    let rest = usize::try_from((nano_digits + FRACTION_DIGITS).max(0)).unwrap_or(usize::MAX);
    let one = 10_i128.pow(FRACTION_DIGITS as u32);
    let rounds_up = fraction % one != 0 || digits.iter().skip(rest).any(|digit| *digit != b'0');
    let nanos = nanos.checked_mul(1_i128 << binary).and_then(|nanos| nanos.checked_add(fraction / one));
    nanos.map_or(MAX_NANOS, |nanos| nanos.saturating_add(rounds_up.into()).min(MAX_NANOS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_read_as_upstream_reads_them() {
        for (text, value, millis) in [
            ("0", 0, 0),
            ("1", 1, 1000),
            ("100m", 1, 100),
            ("1500m", 2, 1500),
            ("0.5", 1, 500),
            (".5", 1, 500),
            ("5.", 5, 5000),
            ("1k", 1000, 1_000_000),
            ("1Ki", 1024, 1_024_000),
            ("1.5Gi", 1_610_612_736, 1_610_612_736_000),
            ("128Mi", 134_217_728, 134_217_728_000),
            ("1e3", 1000, 1_000_000),
            ("1E3", 1000, 1_000_000),
            ("12E-2", 1, 120),
            ("1n", 1, 1),
            ("0.1n", 1, 1),
            ("-1500m", -2, -1500),
            ("+2", 2, 2000),
            ("1E", 1_000_000_000_000_000_000, i64::MAX),
            ("99999999999999999999", i64::MAX, i64::MAX),
            // More digits than an integer has: only those before the point make it large.
            ("1.0000000000000000000000000000000000000001", 2, 1001),
            ("0.99999999999999999999999Ei", 1 << 60, i64::MAX),
            ("0.00000000000000000000000000000000000000000000001e47", 1, 1000),
            ("100000000000000000000000000000000000000000e-41", 1, 1000),
            ("0000000000000000000000000000000000000000000000001Ki", 1024, 1_024_000),
            ("1e-2147483648", 1, 1),
            ("1e2147483647", i64::MAX, i64::MAX),
            ("0e2147483647", 0, 0),
        ] {
            let quantity = Quantity::parse(text).unwrap();
            assert_eq!((quantity.value(), quantity.millis()), (value, millis), "{text}");
        }
    }

    #[test]
    fn amounts_are_written_as_the_api_writes_them() {
        let decimal = |millis| Quantity::from_millis(millis).decimal_text().0;
        assert_eq!([0, 2000, 1900, 110_000, 1_000_000, 500].map(decimal), ["0", "2", "1900m", "110", "1k", "500m"]);
        let binary = |bytes| Quantity::from_units(bytes).binary_text().0;
        assert_eq!(
            [0, 512, 1024, 16_761_114_624, 47_093_746_742, 1 << 30].map(binary),
            ["0", "512", "1Ki", "16368276Ki", "47093746742", "1Gi"]
        );
        assert_eq!(Quantity::from_units(1).less(Quantity::from_units(2)), Quantity::ZERO);
    }

    #[test]
    fn invalid_quantity_is_refused() {
        // Upstream parses "." and "-" as zero, which is never intended.
        for text in ["", ".", "-", "1.2.3", "1KB", "abc", "1 Gi", "0x10", "1Mib"] {
            assert_eq!(Quantity::parse(text), Err(QuantityError::Format), "{text}");
        }
        for text in ["1ki", "1e", "1mm", "1K"] {
            assert_eq!(Quantity::parse(text), Err(QuantityError::Suffix), "{text}");
        }
    }
}
