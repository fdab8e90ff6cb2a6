use super::*;

/// The response of RFC 5769 section 2.2 has this mapped address, by the same transaction id.
#[test]
fn an_address_is_xored_as_in_rfc_5769() {
    let mapped = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 32_853);
    assert_eq!(
        address(xored(mapped)),
        [0x00, 0x01, 0xa1, 0x47, 0xe1, 0x12, 0xa6, 0x43]
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
    let at = |last, port| SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, last), port);
    let response = Response {
        id: request.id,
        mapped: at(1, 5_000),
        origin: at(10, 3_478),
        other: at(20, 3_479),
    };
    assert_eq!(Response::parse(&response.encode()), Some(response));
    assert_eq!(Request::parse(&response.encode()), None);
    assert_eq!(Response::parse(&response.encode()[..40]), None);
}
