//! Amounts in a policy: `500`, `10M`, `64Ki`.
use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};

/// A rate per second or a quantity. `K`, `M`, `G` are powers of 1000 and `Ki`, `Mi`, `Gi` of 1024.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Amount(pub u64);

/// An amount from 1 to 2³² - 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Amount")]
pub struct Count(pub u32);

const UNITS: [(&str, u64); 6] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("K", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
];

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
            .unwrap_or((text, 1));
        let digits = digits.replace('_', "");
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        let number = digits.parse::<u64>().ok().filter(|_| plain);
        let amount = number.and_then(|number| number.checked_mul(unit));
        amount.map(Self).ok_or_else(|| {
            format!("{text:?} is no amount: give a number, as in 500, 10M (millions) or 64Ki")
        })
    }
}

impl TryFrom<Amount> for Count {
    type Error = String;

    fn try_from(Amount(amount): Amount) -> Result<Self, String> {
        let count = u32::try_from(amount).ok().filter(|count| *count > 0);
        count
            .map(Self)
            .ok_or_else(|| format!("{amount} is out of range: give 1 to {}", u32::MAX))
    }
}

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<Amount>()?.try_into()
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Visitor)
    }
}

struct Visitor;

impl de::Visitor<'_> for Visitor {
    type Value = Amount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, or a text like \"10M\"")
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Amount, E> {
        let number = u64::try_from(number);
        let number = number.map_err(|_| E::custom("a negative number is no amount"))?;
        self.visit_u64(number)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Amount, E> {
        Ok(Amount(number))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Amount, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! described {
    ($Type:ident, $least:literal) => {
        impl JsonSchema for $Type {
            fn schema_name() -> Cow<'static, str> {
                stringify!($Type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "oneOf": [
                        { "type": "integer", "minimum": $least },
                        { "type": "string", "pattern": "^[0-9][0-9_]*([KMG]i?)?$" },
                    ],
                })
            }
        }
    };
}

described!(Amount, 0);
described!(Count, 1);
