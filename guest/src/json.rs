//! Writer of one JSON object on one line, field by field.

use alloc::string::String;
use core::fmt::Write;

/// JSON object that is being written.
#[derive(Clone, Debug)]
pub struct Object {
    line: String,
}

impl Default for Object {
    fn default() -> Self {
        Object {
            line: String::from("{"),
        }
    }
}

impl Object {
    /// Starts an object with a first field that names its subject: `{"workload":"crr"`.
    pub fn about(key: &str, value: &str) -> Self {
        Object::default().text(key, value)
    }

    /// Adds a number as a field.
    pub fn number(self, key: &str, value: u64) -> Self {
        self.raw(key, format_args!("{value}"))
    }

    /// Adds a duration, in microseconds with three decimals.
    pub fn microseconds(self, key: &str, ns: u64) -> Self {
        self.raw(key, format_args!("{}.{:03}", ns / 1000, ns % 1000))
    }

    /// Adds `part` divided by `whole`, with three decimals; 0 if `whole` is 0.
    pub fn ratio(self, key: &str, part: u64, whole: u64) -> Self {
        let thousandths = (u128::from(part) * 1000)
            .checked_div(u128::from(whole))
            .unwrap_or(0);
        self.raw(
            key,
            format_args!("{}.{:03}", thousandths / 1000, thousandths % 1000),
        )
    }

    /// Adds a Boolean value.
    pub fn truth(self, key: &str, value: bool) -> Self {
        self.raw(key, format_args!("{value}"))
    }

    /// Adds text, with JSON escapes.
    pub fn text(self, key: &str, value: &str) -> Self {
        self.raw(key, format_args!("{}", Quoted(value)))
    }

    /// Adds a value as text, for values whose text needs no JSON escapes, such as addresses.
    pub fn shown(self, key: &str, value: impl core::fmt::Display) -> Self {
        self.raw(key, format_args!("\"{value}\""))
    }

    /// Adds a list of such values.
    pub fn shown_list<T: core::fmt::Display>(
        self,
        key: &str,
        values: impl IntoIterator<Item = T>,
    ) -> Self {
        let mut list = String::from("[");
        for value in values {
            if list.len() > 1 {
                list.push(',');
            }
            // Writing to a String does not fail.
            let _ = write!(list, "\"{value}\"");
        }
        list.push(']');
        self.raw(key, format_args!("{list}"))
    }

    /// Adds an object as a field.
    pub fn object(self, key: &str, value: Object) -> Self {
        let value = value.into_line();
        self.raw(key, format_args!("{value}"))
    }

    /// Returns the complete line, without a line feed.
    pub fn into_line(mut self) -> String {
        self.line.push('}');
        self.line
    }

    fn raw(mut self, key: &str, value: core::fmt::Arguments<'_>) -> Self {
        if self.line.len() > 1 {
            self.line.push(',');
        }
        let _ = write!(self.line, "{}:{value}", Quoted(key));
        self
    }
}

/// Text as a JSON string (RFC 8259, section 7).
struct Quoted<'a>(&'a str);

impl core::fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                '\0'..='\x1f' => write!(f, "\\u{:04x}", c as u32)?,
                _ => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
#[path = "json_test.rs"]
mod tests;
