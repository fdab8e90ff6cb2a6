use super::*;

#[test]
fn control_characters_are_replaced_and_lines_and_letters_stay() {
    let text = "a\x1b[2J\u{9b}1m\x07\r\u{7f}\tü\nb";
    assert_eq!(
        plain(text),
        "a\u{fffd}[2J\u{fffd}1m\u{fffd}\u{fffd}\u{fffd}\tü\nb"
    );
    assert_eq!(
        one_line("yes: \x1b]0;x\nno\tü"),
        "yes: \u{fffd}]0;x\u{fffd}no\u{fffd}ü"
    );
}
