//! Decimal numbers: the arguments of a request line, and the stored values that `incr` and `decr` work on.

/// Most digits a `u64` takes.
pub const DIGITS_MAX: usize = 20;

/// Reads an unsigned argument: digits alone, at least one, any count of leading zeros.
///
/// `None` for a sign, any other octet, nothing at all, or a number of 2^64 and more.
pub fn parse_u64(token: &[u8]) -> Option<u64> {
    if token.is_empty() {
        return None;
    }
    token.iter().try_fold(0u64, |number, &octet| {
        let digit = octet.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        number.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

/// Reads an unsigned argument below 2^32; otherwise as [`parse_u64`].
pub fn parse_u32(token: &[u8]) -> Option<u32> {
    parse_u64(token)?.try_into().ok()
}

/// Reads the length of a body: below 2^63; otherwise as [`parse_u64`]. A longer one is a negative number that a client
/// printed unsigned: nobody sends that much.
pub fn parse_len(token: &[u8]) -> Option<u64> {
    parse_u64(token).filter(|&len| i64::try_from(len).is_ok())
}

/// Reads an expiry time or a delay: an optional `-` and at least one digit. What an `i64` cannot hold becomes its
/// nearest end, since a time beyond it is for ever away in either direction.
///
/// `None` for anything that is not a number.
pub fn parse_exptime(token: &[u8]) -> Option<i64> {
    let (negative, digits) = match token.split_first() {
        Some((b'-', digits)) => (true, digits),
        _ => (false, token),
    };
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let magnitude = parse_u64(digits).unwrap_or(u64::MAX);
    Some(if negative {
        0i64.checked_sub_unsigned(magnitude).unwrap_or(i64::MIN)
    } else {
        i64::try_from(magnitude).unwrap_or(i64::MAX)
    })
}

/// Reads the whole of a stored value as the number `incr` and `decr` work on: blanks around it, a leading `+` and
/// leading zeros are accepted.
///
/// `None` for an empty value, for text before or behind the digits, for any negative number (memcached wraps very
/// negative ones to positive), and from 2^64 on. Takes time linear in the value: callers bound its length.
pub fn parse_stored_number(value: &[u8]) -> Option<u64> {
    let is_blank = |octet: &u8| matches!(octet, b' ' | b'\t'..=b'\r');
    let first = value.iter().position(|octet| !is_blank(octet))?;
    let last = value.iter().rposition(|octet| !is_blank(octet))?;
    let digits = &value[first..=last];
    parse_u64(digits.strip_prefix(b"+").unwrap_or(digits))
}

/// Appends `number` in decimal.
pub fn append_number(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0u8; DIGITS_MAX];
    let mut start = DIGITS_MAX;
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

/// Appends the value that replaces one of `old_len` bytes after `incr` or `decr`: the number, and blanks behind it up
/// to `old_len` when it is shorter. A value therefore never shrinks, as with memcached.
pub fn append_padded_number(out: &mut Vec<u8>, number: u64, old_len: usize) {
    let start = out.len();
    append_number(out, number);
    let digit_count = out.len() - start;
    if digit_count < old_len {
        out.resize(start + old_len, b' ');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsigned_argument_is_digits_alone() {
        assert_eq!(parse_u64(b"0"), Some(0));
        assert_eq!(parse_u64(b"0000000000000000000000042"), Some(42));
        assert_eq!(parse_u64(b"18446744073709551615"), Some(u64::MAX));
        for refused in
            ["", "18446744073709551616", "99999999999999999999999", "-1", "+1", "1x", "x", " 1", "1\r", "/", ":"]
        {
            assert_eq!(parse_u64(refused.as_bytes()), None, "{refused:?}");
        }
    }

    #[test]
    fn thirty_two_bits_end_at_thirty_two_bits() {
        assert_eq!(parse_u32(b"4294967295"), Some(u32::MAX));
        assert_eq!(parse_u32(b"4294967296"), None);
        assert_eq!(parse_u32(b"18446744073709551616"), None);
    }

    #[test]
    fn a_length_that_was_negative_before_it_was_printed_is_none() {
        assert_eq!(parse_len(b"0"), Some(0));
        assert_eq!(parse_len(b"4294967295"), Some(u64::from(u32::MAX)));
        assert_eq!(parse_len(b"9223372036854775807"), Some(i64::MAX as u64));
        for refused in ["", "-1", "foo", "9223372036854775808", "18446744073709551615", "18446744073709551616"] {
            assert_eq!(parse_len(refused.as_bytes()), None, "{refused:?}");
        }
    }

    #[test]
    fn an_expiry_time_saturates_at_both_ends() {
        assert_eq!(parse_exptime(b"0"), Some(0));
        assert_eq!(parse_exptime(b"-1"), Some(-1));
        assert_eq!(parse_exptime(b"99999999999"), Some(99_999_999_999));
        assert_eq!(parse_exptime(b"9223372036854775807"), Some(i64::MAX));
        assert_eq!(parse_exptime(b"9223372036854775808"), Some(i64::MAX));
        assert_eq!(parse_exptime(b"99999999999999999999999999"), Some(i64::MAX));
        assert_eq!(parse_exptime(b"-9223372036854775808"), Some(i64::MIN));
        assert_eq!(parse_exptime(b"-9223372036854775809"), Some(i64::MIN));
        assert_eq!(parse_exptime(b"-99999999999999999999999999"), Some(i64::MIN));
        for refused in ["", "-", "--1", "+1", "foo", "1x", "-x", "99999999999999999999999x"] {
            assert_eq!(parse_exptime(refused.as_bytes()), None, "{refused:?}");
        }
    }

    #[test]
    fn a_stored_number_may_have_zeros_before_it_and_blanks_around_it() {
        let accepted: [(&str, u64); 9] = [
            ("0", 0),
            ("007", 7),
            (" 7 ", 7),
            ("99 ", 99),
            ("0                   ", 0),
            ("\t7\r\n", 7),
            ("+7", 7),
            ("000000000000000000001", 1),
            ("18446744073709551615", u64::MAX),
        ];
        for (value, number) in accepted {
            assert_eq!(parse_stored_number(value.as_bytes()), Some(number), "{value:?}");
        }
    }

    #[test]
    fn a_stored_value_that_is_no_unsigned_number_is_refused() {
        let refused = [
            "",
            " ",
            "x",
            "hi",
            "-1",
            "-0",
            "7x",
            "7 8",
            "1.5",
            "+",
            "+ 7",
            "++7",
            "7\0",
            "18446744073709551616",
            "-9223372036854775809",
            "-18446744073709551615",
        ];
        for value in refused {
            assert_eq!(parse_stored_number(value.as_bytes()), None, "{value:?}");
        }
    }

    #[test]
    fn a_result_is_padded_to_the_length_it_replaces() {
        let cases: [(u64, usize, &str); 6] = [
            (99, 3, "99 "),
            (100, 2, "100"),
            (100, 3, "100"),
            (8, 3, "8  "),
            (0, 20, "0                   "),
            (u64::MAX, 0, "18446744073709551615"),
        ];
        for (number, old_len, expected) in cases {
            let mut out = b"before".to_vec();
            append_padded_number(&mut out, number, old_len);
            assert_eq!(out, [b"before", expected.as_bytes()].concat());
        }
    }
}
