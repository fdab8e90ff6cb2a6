//! A host name as a client says it, in a TLS hello or a Host header.
use slipgate_policy::Name;

/// A checked host name: DNS wire form, lower case.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HostName(Box<[u8]>);

impl HostName {
    /// From text such as `www.example.com`, with or without the dot at the end. `None` for what is
    /// no host name: letters, digits, `-` and `_` in labels of 1 to 63 octets, 255 in all with
    /// their lengths, and no address (RFC 6066 section 3 and RFC 9110 section 7.2 know both; what
    /// ends in a number is an address, WHATWG URL section 3.5).
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

    /// As DNS has it.
    pub fn name(&self) -> Name<'_> {
        Name(&self.0)
    }
}

#[cfg(test)]
#[path = "host_name_test.rs"]
mod tests;
