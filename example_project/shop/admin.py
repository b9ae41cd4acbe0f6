"""The shop's tables in Django's admin."""

from django.contrib import admin

from shop.models import Payment, Product, Report

admin.site.register([Payment, Product, Report])
