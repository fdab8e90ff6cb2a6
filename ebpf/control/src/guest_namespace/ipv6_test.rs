use super::*;

/// As Linux 6.18 writes them: of the link's prefix, of the default route, and of the address.
const ROUTES_OF_BOTH: &str = "\
fd736c69706700000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001     tap0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 fd736c69706700000000000000000001 00000400 00000001 00000000 00000003     tap0
fd736c69706700000000000000000015 80 00000000000000000000000000000000 00 00000000000000000000000000000000 00000000 00000003 00000000 80200001     tap0
";

#[test]
fn an_address_is_the_kernel_s_own_once_it_has_a_local_route() {
    let address = "fd73:6c69:7067::15".parse().unwrap();
    assert!(is_local(ROUTES_OF_BOTH, address));
    let before: String = ROUTES_OF_BOTH
        .lines()
        .take(2)
        .collect::<Vec<_>>()
        .join("\n");
    assert!(!is_local(&before, address));
    // A route to another address, or one that is no local one.
    assert!(!is_local(
        ROUTES_OF_BOTH,
        "fd73:6c69:7067::16".parse().unwrap()
    ));
    assert!(!is_local(
        &ROUTES_OF_BOTH.replace("80200001", "00200001"),
        address
    ));
    assert!(!is_local("", address));
}
