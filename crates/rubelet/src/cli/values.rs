//! Parses the value of a flag for its field.
//!
//! Owns: Go's parsing of numbers, booleans, lists and maps, and its error messages.
//! Upstream: `pflag`, `component-base/cli/flag`, `pkg/util/flag`.

use std::net::IpAddr;

use rubelet_core::config::{GoDuration, QuantityText};
use serde_json::{Map, Value, json};

use super::flags::Kind;

/// `before` is the value of earlier occurrences of the same flag.
pub(super) fn parse(kind: Kind, text: &str, before: Option<Value>) -> Result<Value, String> {
    match kind {
        Kind::Text => Ok(json!(text)),
        Kind::Bool => bool_of(text).map(Value::from),
        Kind::Int32 => int_of(text, 32).map(Value::from),
        Kind::Int64 => int_of(text, 64).map(Value::from),
        Kind::Duration => Ok(json!(text.parse::<GoDuration>()?)),
        Kind::Ip => ip_of(text, before),
        Kind::List => Ok(appended(before, csv(text)?.into_iter().map(Value::from))),
        Kind::Map => added(before, pairs(text, "=", "string=string")?),
        Kind::Pair => {
            let (name, value) = text.split_once('=').ok_or("malformed pair, expect string=string")?;
            added(before, vec![(name.trim().to_owned(), json!(value.trim()))])
        }
        Kind::Thresholds => added(before, pairs(text, "<", "string<string")?),
        Kind::Headers => headers(text, before),
        Kind::Gates => gates(text, before),
        Kind::Labels => {
            let labels = text.split(',').filter(|item| !item.is_empty()).map(|item| {
                let (name, value) = item.split_once('=').unwrap_or((item, ""));
                (name.trim().to_owned(), json!(value.trim()))
            });
            added(before, labels.collect())
        }
        Kind::Taints => taints(text),
        Kind::ReservedMemory => reserved_memory(text, before),
        Kind::Quantity => Ok(json!(text.parse::<QuantityText>()?)),
        Kind::Level => level_of(text).map(Value::from),
        Kind::VModule => vmodule(text, before),
        Kind::Version if text == "raw" || text.starts_with('v') => Ok(json!(text)),
        Kind::Version => bool_of(text).map(Value::from),
    }
}

fn bool_of(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("strconv.ParseBool: parsing {text:?}: invalid syntax")),
    }
}

/// Go's base 0: `0x`, `0o` or a bare `0`, and `0b` change the base; underscores may separate digits.
fn int_of(text: &str, bits: u32) -> Result<i64, String> {
    let error = |what: &str| format!("strconv.ParseInt: parsing {text:?}: {what}");
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        _ => (false, text),
    };
    let lower = unsigned.to_ascii_lowercase();
    let (radix, digits) = match lower.get(..2) {
        Some("0x") => (16, &lower[2..]),
        Some("0o") => (8, &lower[2..]),
        Some("0b") => (2, &lower[2..]),
        Some(_) if lower.starts_with('0') => (8, &lower[1..]),
        Some(_) | None => (10, &lower[..]),
    };
    let digits = digits.replace('_', "");
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return Err(error("invalid syntax"));
    }
    let magnitude = i128::from_str_radix(&digits, radix).map_err(|_| error("value out of range"))?;
    let value = if negative { -magnitude } else { magnitude };
    let limit = 1_i128 << (bits - 1);
    if value < -limit || value >= limit {
        return Err(error("value out of range"));
    }
    i64::try_from(value).map_err(|_| error("value out of range"))
}

fn level_of(text: &str) -> Result<u32, String> {
    let error = |what: &str| format!("strconv.ParseUint: parsing {text:?}: {what}");
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(error("invalid syntax"));
    }
    text.parse().ok().filter(|level| *level <= i32::MAX as u32).ok_or_else(|| error("value out of range"))
}

fn ip_of(text: &str, before: Option<Value>) -> Result<Value, String> {
    if text.is_empty() {
        // Upstream treats an empty value as no change.
        return Ok(before.unwrap_or(Value::Null));
    }
    // Go parses octets with leading zeroes as decimal.
    let without_zeroes =
        text.split('.').map(|part| part.trim_start_matches('0')).map(|part| if part.is_empty() { "0" } else { part });
    let readable = if text.contains(':') { text.to_owned() } else { without_zeroes.collect::<Vec<_>>().join(".") };
    match readable.parse::<IpAddr>() {
        Ok(_) => Ok(json!(text)),
        Err(_) => Err(format!("{text:?} is not a valid IP address")),
    }
}

/// One line of comma-separated values; quoted commas do not separate.
fn csv(text: &str) -> Result<Vec<String>, String> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let mut items = Vec::new();
    let mut rest = text;
    loop {
        let Some(quoted) = rest.strip_prefix('"') else {
            let (item, after) = rest.split_once(',').map_or((rest, None), |(item, after)| (item, Some(after)));
            if item.contains('"') {
                return Err(format!("parse error on line 1: bare \" in non-quoted-field in {text:?}"));
            }
            items.push(item.to_owned());
            match after {
                Some(after) => rest = after,
                None => return Ok(items),
            }
            continue;
        };
        let mut item = String::new();
        let mut chars = quoted.char_indices().peekable();
        let end = loop {
            match chars.next() {
                Some((_, '"')) if chars.peek().is_some_and(|(_, next)| *next == '"') => {
                    chars.next();
                    item.push('"');
                }
                Some((at, '"')) => break at + 1,
                Some((_, other)) => item.push(other),
                None => {
                    return Err(format!("parse error on line 1: extraneous or missing \" in quoted-field in {text:?}"));
                }
            }
        };
        items.push(item);
        match quoted[end..].strip_prefix(',') {
            Some(after) => rest = after,
            None if quoted.len() == end => return Ok(items),
            None => return Err(format!("parse error on line 1: extraneous or missing \" in quoted-field in {text:?}")),
        }
    }
}

fn pairs(text: &str, separator: &str, form: &str) -> Result<Vec<(String, Value)>, String> {
    let items = text.split(',').filter(|item| !item.is_empty());
    items
        .map(|item| {
            let (name, value) = item.split_once(separator).ok_or(format!("malformed pair, expect {form}"))?;
            Ok((name.trim().to_owned(), json!(value.trim())))
        })
        .collect()
}

fn headers(text: &str, before: Option<Value>) -> Result<Value, String> {
    let mut map = object(before);
    for (name, value) in pairs(text, ":", "string:string")? {
        let values = map.remove(&name);
        map.insert(name, appended(values, [value]));
    }
    Ok(Value::Object(map))
}

fn gates(text: &str, before: Option<Value>) -> Result<Value, String> {
    let mut map = object(before);
    for item in text.split(',').filter(|item| !item.is_empty()) {
        let (name, value) = item.split_once('=').ok_or("malformed pair, expect string=bool")?;
        let (name, value) = (name.trim(), value.trim());
        let on = bool_of(value).map_err(|error| format!("invalid value of {name}: {value}, err: {error}"))?;
        map.insert(name.to_owned(), json!(on));
    }
    Ok(Value::Object(map))
}

fn taints(text: &str) -> Result<Value, String> {
    let mut taints: Vec<Value> = Vec::new();
    // A trailing dash requests removal, which has no meaning for a node that is not registered yet.
    for item in text.split(',').filter(|item| !item.is_empty() && !item.ends_with('-')) {
        let invalid = || format!("invalid taint spec: {item}");
        let (pair, effect) = item.split_once(':').ok_or_else(invalid)?;
        if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect) {
            return Err(format!("invalid taint effect: {effect}, unsupported taint effect"));
        }
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if key.is_empty() || value.contains('=') {
            return Err(invalid());
        }
        if taints.iter().any(|known| known["key"] == key && known["effect"] == effect) {
            return Err(format!("duplicated taints with the same key and effect: {item}"));
        }
        taints.push(if value.is_empty() {
            json!({"key": key, "effect": effect})
        } else {
            json!({"key": key, "value": value, "effect": effect})
        });
    }
    Ok(Value::Array(taints))
}

fn reserved_memory(text: &str, before: Option<Value>) -> Result<Value, String> {
    let mut nodes = Vec::new();
    for item in text.split(';').filter(|_| !text.is_empty()) {
        const FORM: &str =
            "the reserved memory has incorrect format, expected numaNodeID:type=quantity[,type=quantity...]";
        let (node, limits) =
            item.split_once(':').filter(|(_, rest)| !rest.contains(':')).ok_or(format!("{FORM}, got {item}"))?;
        let node: i32 =
            node.parse().map_err(|_| format!("failed to convert the NUMA node ID, expected integer, got {node}"))?;
        let mut by_type = Map::new();
        for limit in limits.split(',') {
            let (name, amount) = limit
                .split_once('=')
                .filter(|(_, amount)| !amount.contains('='))
                .ok_or(format!("the reserved limit has incorrect value, expected type=quantity, got {limit}"))?;
            if name != "memory" && !name.starts_with("hugepages-") {
                return Err(format!("memory type conversion error, unknown type: {name:?}"));
            }
            amount.parse::<QuantityText>().map_err(|_| format!("failed to parse the quantity: {amount}"))?;
            by_type.insert(name.to_owned(), json!(amount));
        }
        nodes.push(json!({"numaNode": node, "limits": by_type}));
    }
    Ok(appended(before, nodes))
}

fn vmodule(text: &str, before: Option<Value>) -> Result<Value, String> {
    let mut items = Vec::new();
    for item in text.split(',').filter(|item| !item.is_empty()) {
        let (pattern, level) = item
            .split_once('=')
            .filter(|(pattern, level)| !pattern.is_empty() && !level.is_empty() && !level.contains('='))
            .ok_or(format!("{item:?} does not have the pattern=N format"))?;
        let level = level_of(level).map_err(|error| format!("parsing verbosity in {item:?}: {error}"))?;
        items.push(json!({"filePattern": pattern, "verbosity": level}));
    }
    Ok(appended(before, items))
}

fn appended(before: Option<Value>, more: impl IntoIterator<Item = Value>) -> Value {
    let mut items = match before {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    };
    items.extend(more);
    Value::Array(items)
}

fn added(before: Option<Value>, more: Vec<(String, Value)>) -> Result<Value, String> {
    let mut map = object(before);
    map.extend(more);
    Ok(Value::Object(map))
}

fn object(before: Option<Value>) -> Map<String, Value> {
    match before {
        Some(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(kind: Kind, texts: &[&str], expected: Value) {
        let value = texts.iter().fold(None, |before, text| Some(parse(kind, text, before).unwrap()));
        assert_eq!(value, Some(expected), "{kind:?} {texts:?}");
    }

    #[test]
    fn values_are_read_as_go_reads_them() {
        check(Kind::Bool, &["T"], json!(true));
        check(Kind::Int32, &["0x10"], json!(16));
        check(Kind::Int32, &["-010"], json!(-8));
        check(Kind::Int64, &["1_000_000"], json!(1_000_000));
        check(Kind::Int32, &["0"], json!(0));
        check(Kind::Duration, &["90s"], json!("1m30s"));
        check(Kind::Ip, &["010.0.0.1"], json!("010.0.0.1"));
        check(Kind::Ip, &["::"], json!("::"));
        check(Kind::Quantity, &["1Ki"], json!("1Ki"));
        check(Kind::Level, &["4"], json!(4));
        check(Kind::Version, &["raw"], json!("raw"));
    }

    #[test]
    fn repeated_flags_collect() {
        check(Kind::List, &["a,b", "c"], json!(["a", "b", "c"]));
        check(Kind::List, &[""], json!([]));
        check(Kind::List, &[r#""a,b",c,"d""e""#], json!(["a,b", "c", "d\"e"]));
        check(Kind::Map, &["a=1, b=2", "b=3"], json!({"a": "1", "b": "3"}));
        check(Kind::Pair, &["a=1,2", "b=x=y"], json!({"a": "1,2", "b": "x=y"}));
        check(
            Kind::Thresholds,
            &["memory.available<1Gi,nodefs.available<10%"],
            json!({"memory.available": "1Gi", "nodefs.available": "10%"}),
        );
        check(
            Kind::Headers,
            &["a:hello,b:again", "b:beautiful:x"],
            json!({"a": ["hello"], "b": ["again", "beautiful:x"]}),
        );
        check(Kind::Gates, &["A=true,B=false", "B=1"], json!({"A": true, "B": true}));
        check(Kind::Labels, &["a=b,c", "d="], json!({"a": "b", "c": "", "d": ""}));
        check(
            Kind::VModule,
            &["a*=1", "b=2,"],
            json!([{"filePattern": "a*", "verbosity": 1}, {"filePattern": "b", "verbosity": 2}]),
        );
        check(
            Kind::ReservedMemory,
            &["0:memory=1Gi,hugepages-1M=2Gi", "1:memory=2Gi"],
            json!([{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-1M": "2Gi"}}, {"numaNode": 1, "limits": {"memory": "2Gi"}}]),
        );
        check(
            Kind::Taints,
            &["a=b:NoSchedule,c:NoExecute,d-"],
            json!([{"key": "a", "value": "b", "effect": "NoSchedule"}, {"key": "c", "effect": "NoExecute"}]),
        );
    }

    #[test]
    fn invalid_values_have_gos_error_texts() {
        let table = [
            (Kind::Bool, "maybe"),
            (Kind::Int32, "ten"),
            (Kind::Int32, "2147483648"),
            (Kind::Int32, ""),
            (Kind::Int32, "08"),
            (Kind::Duration, "5"),
            (Kind::Ip, "localhost"),
            (Kind::Map, "a"),
            (Kind::Thresholds, "memory.available=1"),
            (Kind::Headers, "a"),
            (Kind::Gates, "A=maybe"),
            (Kind::Gates, "A"),
            (Kind::Taints, "a=b"),
            (Kind::Taints, "a=b:Nope"),
            (Kind::ReservedMemory, "x:memory=1"),
            (Kind::ReservedMemory, "0:disk=1"),
            (Kind::Level, "-1"),
            (Kind::VModule, "a"),
            (Kind::List, "a\"b"),
        ];
        let text: Vec<String> =
            table.iter().map(|(kind, text)| format!("{text}: {}", parse(*kind, text, None).unwrap_err())).collect();
        insta::assert_snapshot!(text.join("\n"), @r#"
        maybe: strconv.ParseBool: parsing "maybe": invalid syntax
        ten: strconv.ParseInt: parsing "ten": invalid syntax
        2147483648: strconv.ParseInt: parsing "2147483648": value out of range
        : strconv.ParseInt: parsing "": invalid syntax
        08: strconv.ParseInt: parsing "08": invalid syntax
        5: time: missing unit in duration "5"
        localhost: "localhost" is not a valid IP address
        a: malformed pair, expect string=string
        memory.available=1: malformed pair, expect string<string
        a: malformed pair, expect string:string
        A=maybe: invalid value of A: maybe, err: strconv.ParseBool: parsing "maybe": invalid syntax
        A: malformed pair, expect string=bool
        a=b: invalid taint spec: a=b
        a=b:Nope: invalid taint effect: Nope, unsupported taint effect
        x:memory=1: failed to convert the NUMA node ID, expected integer, got x
        0:disk=1: memory type conversion error, unknown type: "disk"
        -1: strconv.ParseUint: parsing "-1": invalid syntax
        a: "a" does not have the pattern=N format
        a"b: parse error on line 1: bare " in non-quoted-field in "a\"b"
        "#);
    }
}
