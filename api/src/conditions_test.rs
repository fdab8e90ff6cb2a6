use hyper::header::HeaderValue;

use super::*;

fn parsed(headers: &[(&'static str, &[u8])]) -> Result<Replaces, Problem> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(*name, HeaderValue::from_bytes(value).unwrap());
    }
    Conditions::of(&map)?.parsed()
}

#[test]
fn each_form_has_its_meaning() {
    let [a, b] = [b"a", b"b"].map(|content| Version::of(content));
    let one = format!("\"{a}\"");
    let several = format!("\"{a}\" , W/\"{a}\", \"of another\", {b}");
    let any_of = |versions: &[Version]| Replaces::AnyOf(versions.to_vec());
    for (headers, expected) in [
        (&[][..], Replaces::Anything),
        (&[("if-match", &b"*"[..])], Replaces::Existing),
        (&[("if-none-match", b"*")], Replaces::Nothing),
        (&[("if-match", one.as_bytes())], any_of(&[a])),
        (&[("if-match", several.as_bytes())], any_of(&[a, b])),
        (&[("if-match", b"\"3\"")], any_of(&[])),
    ] {
        assert_eq!(parsed(headers).unwrap(), expected, "{headers:?}");
    }
}

#[test]
fn what_has_another_form_is_not_taken_as_absent() {
    let tag = format!("\"{}\"", Version::of(b"a"));
    for headers in [
        &[("if-match", &b"nonsense"[..])][..],
        &[("if-match", b"")],
        &[("if-match", "\"\u{e9}\"".as_bytes())],
        &[("if-match", tag.as_bytes()), ("if-match", tag.as_bytes())],
        &[("if-none-match", tag.as_bytes())],
        &[("if-match", b"*"), ("if-none-match", b"*")],
    ] {
        assert!(parsed(headers).is_err(), "{headers:?}");
    }
}
