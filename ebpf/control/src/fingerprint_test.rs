use super::fingerprint;

/// Test vectors of the authors (draft-eastlake-fnv).
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
