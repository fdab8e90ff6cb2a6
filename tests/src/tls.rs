//! A TLS ClientHello (RFC 8446, 4.1.2) written by hand, so that it shares no code with what reads
//! it under test.

/// Contents of a ClientHello.
#[derive(Clone, Debug, Default)]
pub struct ClientHello {
    /// Name in the server_name extension (RFC 6066, 3); `None`: there is no such extension.
    pub server_name: Option<String>,
    /// More extensions, type and content, behind the others.
    pub extensions: Vec<(u16, Vec<u8>)>,
}

impl ClientHello {
    /// A hello for this server.
    pub fn to(name: &str) -> ClientHello {
        ClientHello {
            server_name: Some(name.to_owned()),
            extensions: Vec::new(),
        }
    }

    /// Adds one extension behind the others.
    pub fn extension(mut self, kind: u16, content: &[u8]) -> ClientHello {
        self.extensions.push((kind, content.to_vec()));
        self
    }

    /// The handshake message, as QUIC carries it.
    pub fn handshake(&self) -> Vec<u8> {
        let mut body = vec![3, 3];
        body.extend((0..32).map(|at| at ^ 0x5a)); // random
        body.extend(with_len8(&[7; 32])); // session id
        body.extend(with_len16(&[0x13, 1, 0x13, 2, 0x13, 3, 0xc0, 0x2f])); // cipher suites
        body.extend(with_len8(&[0])); // compression: none
        let mut extensions = Vec::new();
        let mut add = |kind: u16, content: &[u8]| {
            extensions.extend(kind.to_be_bytes());
            extensions.extend(with_len16(content));
        };
        if let Some(name) = &self.server_name {
            let entry = [&[0][..], &with_len16(name.as_bytes())].concat();
            add(0, &with_len16(&entry));
        }
        add(10, &with_len16(&[0, 0x1d])); // supported groups: x25519
        add(13, &with_len16(&[4, 3, 8, 4, 4, 1])); // signature algorithms
        add(43, &with_len8(&[3, 4, 3, 3])); // versions 1.3, 1.2
        let share = [&[0, 0x1d][..], &with_len16(&[9; 32])].concat();
        add(51, &with_len16(&share)); // key share
        for (kind, content) in &self.extensions {
            add(*kind, content);
        }
        body.extend(with_len16(&extensions));
        let len = (body.len() as u32).to_be_bytes();
        [&[1], &len[1..], &body].concat()
    }

    /// The message in one record, as TCP carries it.
    pub fn record(&self) -> Vec<u8> {
        [&[22, 3, 1][..], &with_len16(&self.handshake())].concat()
    }
}

/// Answer of an [`EchoTls`](crate::servers::TcpService::EchoTls) server: the bytes received, with a
/// ClientHello turned into a ServerHello by its type.
pub fn answer_to(said: &[u8]) -> Vec<u8> {
    let mut answer = said.to_vec();
    Answer::default().to(&mut answer);
    answer
}

/// An answer under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Answer {
    heard: usize,
    is_tls: bool,
}

impl Answer {
    /// Returns the answer to the next received bytes.
    pub fn to(&mut self, bytes: &mut [u8]) {
        const HANDSHAKE: u8 = 22;
        const SERVER_HELLO: u8 = 2;
        const TYPE_AT: usize = 5;
        for octet in bytes {
            match self.heard {
                0 => self.is_tls = *octet == HANDSHAKE,
                TYPE_AT if self.is_tls => *octet = SERVER_HELLO,
                _ => {}
            }
            self.heard += 1;
        }
    }
}

fn with_len8(bytes: &[u8]) -> Vec<u8> {
    [&[bytes.len() as u8][..], bytes].concat()
}

fn with_len16(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

#[cfg(test)]
#[path = "tls_test.rs"]
mod tests;
