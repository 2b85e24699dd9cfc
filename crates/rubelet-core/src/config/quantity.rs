//! A valid quantity in a configuration, as the given text.
//!
//! Owns: how it is decoded and shown. Never: its grammar (`crate::quantity`).

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::Value;

use crate::quantity::Quantity;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantityText {
    text: String,
    pub amount: Quantity,
}

impl Default for QuantityText {
    fn default() -> Self {
        QuantityText { text: "0".to_owned(), amount: Quantity::ZERO }
    }
}

impl FromStr for QuantityText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let amount = Quantity::parse(text).map_err(|error| error.to_string())?;
        Ok(QuantityText { text: text.to_owned(), amount })
    }
}

impl Serialize for QuantityText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for QuantityText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = match Value::deserialize(deserializer)? {
            Value::String(text) => text,
            // Upstream reads an unquoted number as its text.
            Value::Number(number) => number.to_string(),
            other => return Err(de::Error::custom(format!("invalid quantity {other}"))),
        };
        text.parse().map_err(|message| de::Error::custom(format!("invalid quantity {text:?}: {message}")))
    }
}
