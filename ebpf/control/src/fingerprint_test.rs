use super::fingerprint;

/// As its authors have them (draft-eastlake-fnv, test vectors).
#[test]
fn it_is_what_it_was() {
    for (bytes, expected) in [
        ("", "cbf29ce484222325"),
        ("a", "af63dc4c8601ec8c"),
        ("foobar", "85944171f73967e8"),
    ] {
        assert_eq!(fingerprint(bytes.as_bytes()), expected, "{bytes}");
    }
}
