use super::*;
use crate::fake::hellos::{self, server_name};

fn said(handshake: &[u8]) -> Result<Option<String>, Refused> {
    let hello = parse(handshake)?;
    Ok(hello.map(|hello| hello.name.name().without_dot()))
}

#[test]
fn the_name_is_read_as_soon_as_the_hello_is_whole() {
    let hello = hellos::client_hello("Api.Example.com");
    for len in 0..hello.len() {
        assert_eq!(said(&hello[..len]), Ok(None), "{len}");
    }
    assert_eq!(said(&hello), Ok(Some("api.example.com".into())));
}

#[test]
fn what_has_more_than_one_reading_is_refused() {
    let name = server_name(b"a.example");
    let with = hellos::client_hello_with;
    let mut longer_list = name.clone();
    longer_list.1[1] += 1;
    let mut two = name.clone();
    two.1.extend(&name.1[2..]);
    two.1[1] = (two.1.len() - 2) as u8;
    let mut of_another_kind = name.clone();
    of_another_kind.1[2] = 1;
    let mut trailing = with(std::slice::from_ref(&name));
    trailing.push(0);
    trailing[3] += 1;
    let mut cut = with(&[name.clone(), (5, vec![0; 4])]);
    let at = cut.len() - 5;
    cut[at] += 1;
    for (what, hello) in [
        ("twice", with(&[name.clone(), (5, vec![]), name.clone()])),
        (
            "another extension twice",
            with(&[name.clone(), (5, vec![]), (5, vec![])]),
        ),
        ("a longer list", with(&[longer_list])),
        ("two names", with(&[two])),
        ("another kind", with(&[of_another_kind])),
        ("an empty list", with(&[(0, vec![0, 0])])),
        ("nothing", with(&[(0, vec![])])),
        ("bytes behind", trailing),
        ("an extension cut short", cut),
        ("another message", hellos::handshake(2, &[0; 40])),
        ("no hello", hellos::handshake(1, &[3; 40])),
    ] {
        assert_eq!(said(&hello), Err(Refused::Malformed), "{what}");
    }
}

#[test]
fn no_name_or_a_hidden_one_is_refused() {
    let with = hellos::client_hello_with;
    let name = server_name(b"a.example");
    assert_eq!(said(&with(&[(5, vec![])])), Err(Refused::NoName));
    assert_eq!(said(&with(&[])), Err(Refused::NoName));
    for no_name in [&b"192.0.2.1"[..], b"", b"a..b", b"a\0b.example", b"::1"] {
        assert_eq!(said(&with(&[server_name(no_name)])), Err(Refused::NoName));
    }
    for kind in ENCRYPTED {
        let hello = with(&[name.clone(), (kind, vec![0; 8])]);
        assert_eq!(said(&hello), Err(Refused::Encrypted));
    }
}

#[test]
fn a_hello_has_a_bound() {
    assert_eq!(said(&[1, 0, 0x40, 0]), Err(Refused::TooLong));
    assert_eq!(said(&[1, 0, 0x3f, 0xfc]), Ok(None));
}
