//! Inspection: reads the name of the intended server in a connection's first data, before the
//! server receives it.
//!
//! The parsers depend on bytes only: [`tls`] and [`client_hello`], [`http`], [`quic`]. [`protocol_sniffer`]
//! follows a client's stream with them. [`reassembly`] builds the stream from a guest's segments,
//! and [`tcp`] holds it until the decision.
use slipgate_policy::Name;
pub use slipgate_policy::{InspectionRefusal as Refused, RefusedCounts};

pub mod client_hello;
pub mod http;
pub mod protocol_sniffer;
pub mod quic;
pub mod reassembly;
pub(crate) mod sessions;
pub mod tcp;
pub mod tls;

/// A validated host name in DNS wire form, in lower case.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HostName(Box<[u8]>);

impl HostName {
    /// Parses text such as `www.example.com`, with or without a final dot. `None` if it is no host
    /// name: labels of 1 to 63 letters, digits, `-` and `_`, 255 octets in all with their lengths,
    /// and no address (RFC 6066 section 3 and RFC 9110 section 7.2 allow both; a name that ends in
    /// a number is an address, WHATWG URL section 3.5).
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = text.strip_suffix(b".").unwrap_or(text);
        let mut wire = Vec::with_capacity(text.len() + 2);
        let mut last: &[u8] = &[];
        for label in text.split(|b| *b == b'.') {
            let ok = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
            if label.is_empty() || label.len() > 63 || !label.iter().all(ok) {
                return None;
            }
            wire.push(label.len() as u8);
            wire.extend(label.iter().map(u8::to_ascii_lowercase));
            last = label;
        }
        let hexadecimal = last.len() >= 2 && last[0] == b'0' && last[1] | 0x20 == b'x';
        let number = last.iter().all(u8::is_ascii_digit) || hexadecimal;
        wire.push(0);
        (!number && wire.len() <= crate::dns::name::MAX_LEN).then(|| Self(wire.into()))
    }

    /// The name in DNS wire form.
    pub fn name(&self) -> Name<'_> {
        Name(&self.0)
    }
}

#[cfg(test)]
#[path = "host_name_test.rs"]
mod tests;
