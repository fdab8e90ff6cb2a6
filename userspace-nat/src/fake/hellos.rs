//! TLS for tests: hellos, and records to put them in.

/// An extension of a hello: its type and content.
pub type Extension = (u16, Vec<u8>);

/// A server name list with one host name.
pub fn server_name(name: &[u8]) -> Extension {
    let len = name.len() as u16;
    let mut content = (len + 3).to_be_bytes().to_vec();
    content.push(0);
    content.extend(len.to_be_bytes());
    content.extend(name);
    (0, content)
}

/// A ClientHello for a server, with its header.
pub fn client_hello(name: &str) -> Vec<u8> {
    client_hello_with(&[
        (0x0a, vec![0, 2, 0, 0x1d]),
        server_name(name.as_bytes()),
        (0x2b, vec![2, 3, 4]),
    ])
}

/// A ClientHello with these extensions, with its header.
pub fn client_hello_with(extensions: &[Extension]) -> Vec<u8> {
    let mut all = Vec::new();
    for (kind, content) in extensions {
        all.extend(kind.to_be_bytes());
        all.extend((content.len() as u16).to_be_bytes());
        all.extend(content);
    }
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.push(0);
    body.extend([0, 2, 0x13, 1, 1, 0]);
    body.extend((all.len() as u16).to_be_bytes());
    body.extend(all);
    handshake(1, &body)
}

/// A ServerHello; with `retry`, a HelloRetryRequest.
pub fn server_hello(retry: bool) -> Vec<u8> {
    const RETRY: [u8; 32] = [
        0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8,
        0x91, 0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8,
        0x33, 0x9c,
    ];
    let mut body = vec![3, 3];
    body.extend(if retry { RETRY } else { [9; 32] });
    body.extend([0, 0x13, 1, 0, 0, 6, 0, 0x2b, 0, 2, 3, 4]);
    record(22, &handshake(2, &body))
}

/// A TLS handshake message of this type.
pub fn handshake(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut message = (body.len() as u32 | u32::from(kind) << 24)
        .to_be_bytes()
        .to_vec();
    message.extend(body);
    message
}

/// A TLS record of this type.
pub fn record(kind: u8, content: &[u8]) -> Vec<u8> {
    let mut record = vec![kind, 3, 1];
    record.extend((content.len() as u16).to_be_bytes());
    record.extend(content);
    record
}

/// A handshake message in records of this many bytes each.
pub fn records(message: &[u8], each: usize) -> Vec<u8> {
    message
        .chunks(each)
        .flat_map(|part| record(22, part))
        .collect()
}
