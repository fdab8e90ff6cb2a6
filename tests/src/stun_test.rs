use super::*;

const ID: TransactionId = [
    0xb7, 0xe7, 0xa7, 0x01, 0xbc, 0x34, 0xd6, 0x86, 0xfa, 0x87, 0xdf, 0xae,
];

/// The response of RFC 5769 section 2.2 has this mapped address, by the same transaction id.
#[test]
fn an_address_is_xored_as_in_rfc_5769() {
    let mapped = "192.0.2.1:32853".parse().unwrap();
    assert_eq!(
        address(xored(mapped, &ID)),
        [0x00, 0x01, 0xa1, 0x47, 0xe1, 0x12, 0xa6, 0x43]
    );
    // Section 2.3.
    let mapped = "[2001:db8:1234:5678:11:2233:4455:6677]:32853"
        .parse()
        .unwrap();
    assert_eq!(
        address(xored(mapped, &ID)),
        [
            0x00, 0x02, 0xa1, 0x47, 0x01, 0x13, 0xa9, 0xfa, 0xa5, 0xd3, 0xf1, 0x79, 0xbc, 0x25,
            0xf4, 0xb5, 0xbe, 0xd2, 0xb9, 0xd9
        ]
    );
}

#[test]
fn what_is_encoded_is_parsed_again() {
    let request = Request {
        id: *b"transactions",
        changes_address: true,
        changes_port: false,
    };
    assert_eq!(Request::parse(&request.encode()), Some(request));
    let response = Response {
        id: request.id,
        mapped: "[2001:db8::1]:5000".parse().unwrap(),
        origin: "203.0.113.10:3478".parse().unwrap(),
        other: "203.0.113.20:3479".parse().unwrap(),
    };
    assert_eq!(Response::parse(&response.encode()), Some(response));
    assert_eq!(Request::parse(&response.encode()), None);
    assert_eq!(Response::parse(&response.encode()[..40]), None);
}
