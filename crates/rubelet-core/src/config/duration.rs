//! Durations as Go writes them: `2m0s`, `1h30m`, `100ms`.
//!
//! Owns: parsing and printing. Never: measures time.
//! Upstream: `time.ParseDuration`, `time.Duration.String`, `metav1.Duration`.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Nanoseconds; may be negative, as some fields use that for "never".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(i64);

const MICROSECOND: i64 = 1_000;
const MILLISECOND: i64 = 1_000_000;
const SECOND: i64 = 1_000_000_000;

const UNITS: &[(&str, i64)] = &[
    ("ns", 1),
    ("us", MICROSECOND),
    ("\u{b5}s", MICROSECOND),
    ("\u{3bc}s", MICROSECOND),
    ("ms", MILLISECOND),
    ("s", SECOND),
    ("m", 60 * SECOND),
    ("h", 3600 * SECOND),
];

impl GoDuration {
    pub const fn from_secs(secs: i64) -> Self {
        Self(secs * SECOND)
    }

    pub const fn from_millis(millis: i64) -> Self {
        Self(millis * MILLISECOND)
    }

    pub const fn from_nanos(nanos: i64) -> Self {
        Self(nanos)
    }

    pub const fn as_nanos(self) -> i64 {
        self.0
    }

    pub const fn as_millis(self) -> i64 {
        self.0 / MILLISECOND
    }

    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / SECOND as f64
    }

    /// For waiting; a negative duration is zero.
    pub fn as_std(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }
}

impl From<Duration> for GoDuration {
    fn from(duration: Duration) -> Self {
        Self(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
    }
}

impl FromStr for GoDuration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || format!("time: invalid duration {text:?}");
        let (negative, mut rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        if rest == "0" {
            return Ok(Self(0));
        }
        if rest.is_empty() {
            return Err(invalid());
        }
        let mut total: i128 = 0;
        while !rest.is_empty() {
            let number_len = rest.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(rest.len());
            let (number, after) = rest.split_at(number_len);
            let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
            if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
                return Err(invalid());
            }
            let unit_len = after.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(after.len());
            let (unit, after) = after.split_at(unit_len);
            if unit.is_empty() {
                return Err(format!("time: missing unit in duration {text:?}"));
            }
            let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
                return Err(format!("time: unknown unit {unit:?} in duration {text:?}"));
            };
            total += nanos_of(whole, fraction, *scale).ok_or_else(invalid)?;
            rest = after;
        }
        let signed = if negative { -total } else { total };
        i64::try_from(signed).map(Self).map_err(|_| invalid())
    }
}

/// `None` when it cannot fit any duration.
fn nanos_of(whole: &str, fraction: &str, scale: i64) -> Option<i128> {
    let whole: i128 = if whole.is_empty() { 0 } else { whole.parse::<u64>().ok()?.into() };
    // Digits below a nanosecond of the largest unit change nothing.
    let digits = &fraction[..fraction.len().min(18)];
    let fraction_nanos = match digits.parse::<u64>() {
        Ok(value) => i128::from(value) * i128::from(scale) / 10_i128.pow(u32::try_from(digits.len()).ok()?),
        Err(_) => 0,
    };
    Some(whole * i128::from(scale) + fraction_nanos)
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.unsigned_abs();
        if self.0 < 0 {
            f.write_str("-")?;
        }
        let second = SECOND.unsigned_abs();
        match nanos {
            0 => f.write_str("0s"),
            _ if nanos < MICROSECOND.unsigned_abs() => write!(f, "{nanos}ns"),
            _ if nanos < MILLISECOND.unsigned_abs() => write!(f, "{}\u{b5}s", decimal(nanos, MICROSECOND)),
            _ if nanos < second => write!(f, "{}ms", decimal(nanos, MILLISECOND)),
            _ => {
                let (minutes, rest) = (nanos / (60 * second), nanos % (60 * second));
                if minutes >= 60 {
                    write!(f, "{}h", minutes / 60)?;
                }
                if minutes > 0 {
                    write!(f, "{}m", minutes % 60)?;
                }
                write!(f, "{}s", decimal(rest, SECOND))
            }
        }
    }
}

/// `nanos` in units of `scale`, without trailing zeroes.
fn decimal(nanos: u64, scale: i64) -> String {
    let scale = scale.unsigned_abs();
    let (whole, fraction) = (nanos / scale, nanos % scale);
    if fraction == 0 {
        return whole.to_string();
    }
    let width = scale.ilog10() as usize;
    format!("{whole}.{}", format!("{fraction:0width$}").trim_end_matches('0'))
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|message| de::Error::custom(format!("{message}, allowed are forms such as 300ms, 10s or 2h45m")))
    }
}

/// `logging.flushFrequency`: a duration, or for old files a number of nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushFrequency {
    pub duration: GoDuration,
    /// As it was given, so that it is shown again the same way.
    pub form: FlushForm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushForm {
    Text,
    Nanos,
}

impl Default for FlushFrequency {
    fn default() -> Self {
        FlushFrequency { duration: GoDuration::default(), form: FlushForm::Text }
    }
}

impl Serialize for FlushFrequency {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.form {
            FlushForm::Text => self.duration.serialize(serializer),
            FlushForm::Nanos => self.duration.as_nanos().serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for FlushFrequency {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::String(text) => {
                let duration = text.parse().map_err(de::Error::custom)?;
                Ok(FlushFrequency { duration, form: FlushForm::Text })
            }
            other => match other.as_i64() {
                Some(0) => Ok(FlushFrequency::default()),
                Some(nanos) => Ok(FlushFrequency { duration: GoDuration(nanos), form: FlushForm::Nanos }),
                None => Err(de::Error::custom(format!("invalid duration {other}, expected text or nanoseconds"))),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn prints_as_go_prints() {
        let table = [
            (0, "0s"),
            (1, "1ns"),
            (1_100, "1.1\u{b5}s"),
            (2_200_000, "2.2ms"),
            (3_300_000_000, "3.3s"),
            (120 * SECOND, "2m0s"),
            (4 * 3600 * SECOND, "4h0m0s"),
            (245 * SECOND + MILLISECOND, "4m5.001s"),
            (-SECOND, "-1s"),
            (i64::MAX, "2562047h47m16.854775807s"),
            (i64::MIN, "-2562047h47m16.854775808s"),
        ];
        for (nanos, text) in table {
            assert_eq!(GoDuration(nanos).to_string(), text);
        }
    }

    #[test]
    fn refuses_what_go_refuses_in_its_words() {
        let table = [
            ("", r#"time: invalid duration """#),
            ("3", r#"time: missing unit in duration "3""#),
            ("-", r#"time: invalid duration "-""#),
            ("s", r#"time: invalid duration "s""#),
            (".s", r#"time: invalid duration ".s""#),
            ("5x", r#"time: unknown unit "x" in duration "5x""#),
            ("1.2.3s", r#"time: invalid duration "1.2.3s""#),
            ("3000000h", r#"time: invalid duration "3000000h""#),
        ];
        for (text, error) in table {
            assert_eq!(text.parse::<GoDuration>().unwrap_err(), error, "{text}");
        }
    }

    #[test]
    fn accepts_go_forms() {
        let table = [
            ("+5s", 5 * SECOND),
            ("-1.5h", -5400 * SECOND),
            (".5s", SECOND / 2),
            ("1h2m3s4ms5us6ns", 3_723_004_005_006),
        ];
        for (text, nanos) in table {
            assert_eq!(text.parse::<GoDuration>().unwrap().as_nanos(), nanos, "{text}");
        }
    }

    proptest! {
        #[test]
        fn printed_value_parses_back(nanos in any::<i64>()) {
            let duration = GoDuration(nanos);
            prop_assert_eq!(duration.to_string().parse::<GoDuration>(), Ok(duration));
        }
    }
}
